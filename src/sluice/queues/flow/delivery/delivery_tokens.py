"""Delivery tokens: proof that a client received one delivery.

A token has three parts. The counter orders the deliveries of a store. The run tells which start of
the broker issued the token. The tag authenticates both, together with the group, the identity of
the client (its id and its user), the partition and the sequence, so that a token cannot be guessed
and is valid for one delivery to one client:

    tag = pad(run, counter) xor hash(group, identity, partition, sequence)        64 bits

This is a Carter-Wegman authenticator, the construction of Poly1305. The hash is universal: linear,
with secret keys, in two halves modulo a prime. Its result is hidden by a pad that no other delivery
uses, because a counter is issued once in a run and every run has keys of its own. A forged tag is
valid with a probability of 2^-64. All keys are derived from the secret of the store, which the
store persists, so tokens of earlier runs and earlier owners can be verified.

Issuing a token computes no cryptographic hash. SHAKE-128 makes the pads of 256 counters at once,
and HMAC-SHA256 makes the part for group and identity when a consumer joins.

This module draws no random numbers: secret and run are parameters.
"""

from __future__ import annotations

import hmac
from hashlib import shake_128
from typing import TYPE_CHECKING, Final

from librt.strings import read_i64_le
from mypy_extensions import i64

if TYPE_CHECKING:
    from sluice.queues.model import Consumer, Lease

SECRET_BYTES: Final = 32
RUN_BYTES: Final = 4

_PRIME: Final = 4_294_967_291  # 2^32 - 5
_PAD_BITS: Final = 8
_PAD_MASK: Final = 255
_WORD_BITS: Final = 30  # a key times 30 bits of a sequence stays below 2^62
_WORD_MASK: Final = 0x3FFF_FFFF


class DeliveryToken:
    """A token as a client presents it. Counter 0: none was given; -1: the text is not a token."""

    def __init__(self, counter: i64 = 0, run: i64 = 0, tag: i64 = 0) -> None:
        self.counter: i64 = counter
        self.run: i64 = run
        self.tag: i64 = tag


class RunKeys:
    """The keys of one run, derived from the secret of the store."""

    def __init__(self, secret: bytes, run: i64) -> None:
        self.run: i64 = run
        self._key: bytes = hmac.digest(
            secret, b"delivery tokens" + int(run).to_bytes(8, "little"), "sha256"
        )
        keys = _residues(shake_128(self._key + b"hash").digest(48))
        self._high_first: i64 = keys[0]
        self._high_second: i64 = keys[1]
        self._high_pid: i64 = keys[2]
        self._low_first: i64 = keys[3]
        self._low_second: i64 = keys[4]
        self._low_pid: i64 = keys[5]

    def member_hash(self, gid: i64, identity: str) -> list[int]:
        """Return the contribution of group and identity to the two halves of the hash."""
        name = identity.encode("utf-8", "surrogatepass")
        member = b"member" + int(gid).to_bytes(8, "little") + name
        return _residues(hmac.digest(self._key, member, "sha256")[:16])

    def pads(self, block: i64) -> bytes:
        """Return the pads of the 256 counters of `block`."""
        return shake_128(self._key + b"pads" + int(block).to_bytes(8, "little")).digest(
            8 << _PAD_BITS
        )

    def hash(self, member_high: i64, member_low: i64, pid: i64, seq: i64) -> i64:
        """Return the universal hash.

        No intermediate result exceeds 63 bits, so compiled and interpreted results are the same.
        """
        first: i64 = seq & _WORD_MASK
        second: i64 = seq >> _WORD_BITS
        high: i64 = (member_high + self._high_first * first + self._high_second * second) % _PRIME
        low: i64 = (member_low + self._low_first * first + self._low_second * second) % _PRIME
        high = (high + self._high_pid * pid % _PRIME) % _PRIME
        low = (low + self._low_pid * pid % _PRIME) % _PRIME
        if high >= 0x8000_0000:
            high -= 0x1_0000_0000
        return (high << 32) | low


class DeliveryTokens:
    """Issues the tokens of this run and checks those of any run."""

    def __init__(self) -> None:
        self.secret: bytes = b""  # of the store; empty until loaded or created
        self.run: i64 = 0
        self.first_counter: i64 = 1  # the first counter of this run
        self._next_counter: i64 = 1
        self._keys: RunKeys = RunKeys(b"", 0)
        self._previous_keys: RunKeys = self._keys  # of the earlier run that was used last
        self._block: i64 = -1
        self._pads: bytes = b""
        # Keys and block of the token that was verified last, and its pads.
        self._checked_keys: RunKeys = self._keys
        self._checked_block: i64 = -1
        self._checked_pads: bytes = b""
        self._run_text: bytes = b""

    def start_run(self, secret: bytes, run: i64, first_counter: i64) -> None:
        """Start a run. `run` must differ from all earlier runs whose counters may overlap."""
        self.secret = secret
        self.run = run
        self.first_counter = first_counter
        self._next_counter = first_counter
        self._keys = RunKeys(secret, run)
        self._previous_keys = self._keys
        self._block = -1
        self._checked_keys = self._keys
        self._checked_block = -1
        self._run_text = b"-%08x" % int(run)

    def prepare_consumer(self, consumer: Consumer, gid: i64) -> None:
        """Compute the consumer's part of the hash, for a new group or identity."""
        member_hash = self._keys.member_hash(gid, consumer.identity)
        consumer.token_member_hash_high = member_hash[0]
        consumer.token_member_hash_low = member_hash[1]
        consumer.token_run_text = self._run_text

    def issue(self, lease: Lease, consumer: Consumer, pid: i64) -> None:
        """Assign a token to a delivery."""
        counter = self._next_counter
        self._next_counter = counter + 1
        block: i64 = counter >> _PAD_BITS
        if block != self._block:
            self._block = block
            self._pads = self._keys.pads(block)
        lease.token_counter = counter
        lease.token_tag = read_i64_le(self._pads, (counter & _PAD_MASK) << 3) ^ self._keys.hash(
            consumer.token_member_hash_high, consumer.token_member_hash_low, pid, lease.seq
        )

    def has_issued(self, token: DeliveryToken) -> bool:
        """Return whether this run has issued the counter of `token`. Does not check the tag."""
        return token.run == self.run and self.first_counter <= token.counter < self._next_counter

    def is_valid(self, token: DeliveryToken, gid: i64, identity: str, pid: i64, seq: i64) -> bool:
        """Return whether a run of this store issued `token` to `identity` for this message. Slow.

        The pads of the last token are cached: a packet may present one token for many messages.
        """
        if token.counter <= 0:
            return False
        keys = self._keys
        if token.run != self.run:
            if self._previous_keys.run != token.run:
                self._previous_keys = RunKeys(self.secret, token.run)
            keys = self._previous_keys
        member_hash = keys.member_hash(gid, identity)
        block: i64 = token.counter >> _PAD_BITS
        if block != self._checked_block or keys is not self._checked_keys:
            self._checked_pads = keys.pads(block)
            self._checked_block = block
            self._checked_keys = keys
        pad = read_i64_le(self._checked_pads, (token.counter & _PAD_MASK) << 3)
        tag = pad ^ keys.hash(member_hash[0], member_hash[1], pid, seq)
        return hmac.compare_digest(_tag_bytes(tag), _tag_bytes(token.tag))


def _residues(material: bytes) -> list[int]:
    """Split random bytes into 64-bit numbers, each modulo the prime."""
    return [
        int.from_bytes(material[at : at + 8], "little") % _PRIME
        for at in range(0, len(material), 8)
    ]


def _tag_bytes(tag: i64) -> bytes:
    return int(tag).to_bytes(8, "little", signed=True)
