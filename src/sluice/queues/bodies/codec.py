"""Zstandard compression of payloads, for queues that configure it."""

from __future__ import annotations

import zstandard

from sluice.queues.ports import Codec


class ZstdCodec(Codec):
    def __init__(self, level: int = 3) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level)
        self._decompressor = zstandard.ZstdDecompressor()

    def compress(self, data: bytes) -> bytes:
        return self._compressor.compress(data)

    def decompress(self, data: bytes) -> bytes:
        try:
            return self._decompressor.decompress(data)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None
