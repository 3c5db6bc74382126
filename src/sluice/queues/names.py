"""What queues and messages are called."""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, write_i64_be
from mypy_extensions import i64

DLQ_PREFIX: Final = "dlq/"
REPLY_QUEUE_PREFIX: Final = "responses/"
_USER_SEPARATOR: Final = "\0"  # no client id has it [MQTT-1.5.4-2]

_HEX: Final = b"0123456789abcdef"


def queue_name_error(name: str) -> str:
    """Why a queue cannot have this name; the empty string when it can."""
    if not name or any(not level for level in name.split("/")):
        return "a queue name has one or more levels, none of them empty"
    if any(character in name for character in "+#$"):
        return "a queue name has no +, # or $"
    if not is_printable(name):
        return "a queue name has no control characters"
    if len(name.encode()) > 1024:
        return "a queue name has at most 1,024 bytes"
    if name in ("dlq", "responses"):
        return f"{name} is reserved: queues below it belong to other queues"
    return ""


def is_dot_segment(text: str) -> bool:
    """Whether clients and proxies of HTTP drop this level from a path: then the path names something else."""
    return text == "." or text == ".."


def new_queue_name_error(name: str) -> str:
    """Why a queue cannot be created under this name. One of an earlier version may have it, and keeps it."""
    if any(is_dot_segment(level) for level in name.split("/")):
        return "no level of a queue name is '.' or '..', because paths of REST lose such a level"
    return queue_name_error(name)


def new_group_name_error(name: str) -> str:
    """What to do about a group that cannot be created under this name."""
    if is_dot_segment(name):
        return (
            "Give another consumer-group than '.' and '..', because paths of REST lose such a name"
        )
    return group_name_error(name)


def group_name_error(name: str) -> str:
    """What to do about a group that cannot have this name; the empty string when it can."""
    if not name or len(name) > 256 or any(character in name for character in "/+#$"):
        return "Give 1 to 256 characters without / + # and $"
    return "" if is_printable(name) else "Give a name without control characters"


def make_identity(client: str, user: str) -> str:
    """Return what deliveries to a client are bound to: the client id and, if it has one, its user.

    A client id alone is no proof. When its session has ended, a client of any user can connect with it.
    """
    return client + _USER_SEPARATOR + user if user else client


def client_id_of(identity: str) -> str:
    """Return the client id of an identity."""
    return identity.partition(_USER_SEPARATOR)[0]


def is_printable(name: str) -> bool:
    """Whether a packet can carry a name, and a terminal show it: no control characters, no halves of characters."""
    for character in name:
        code = ord(character)
        if code < 0x20 or 0x7F <= code <= 0x9F or 0xD800 <= code <= 0xDFFF:
            return False
    return True


def write_hex(out: BytesWriter, value: i64) -> None:
    shift: i64 = 0
    while shift < 60 and (value >> (shift + 4)) != 0:
        shift += 4
    while shift >= 0:
        out.append(_HEX[(value >> shift) & 15])
        shift -= 4


def write_hex_16(out: BytesWriter, value: i64) -> None:
    """Write a number as 16 digits, a negative one in two's complement."""
    write_i64_be(out, _eight_digits((value >> 32) & 0xFFFF_FFFF))
    write_i64_be(out, _eight_digits(value & 0xFFFF_FFFF))


def _eight_digits(value: i64) -> i64:
    """Return the digits of a 32-bit number as eight ASCII characters, the first one in the highest byte.

    Each step doubles the distance between the parts of the number, until each byte holds four bits of it.
    """
    value = (value | (value << 16)) & 0x0000_FFFF_0000_FFFF
    value = (value | (value << 8)) & 0x00FF_00FF_00FF_00FF
    value = (value | (value << 4)) & 0x0F0F_0F0F_0F0F_0F0F
    letter_mask: i64 = (
        (value + 0x0606_0606_0606_0606) >> 4
    ) & 0x0101_0101_0101_0101  # 1 where a digit is over 9
    return value + 0x3030_3030_3030_3030 + letter_mask * 0x27


def format_message_id(pid: i64, seq: i64) -> bytes:
    """The id of a message whose publisher gave it none: unique in its store for ever."""
    out = BytesWriter()
    write_hex(out, pid)
    out.append(0x2D)
    write_hex(out, seq)
    return out.getvalue()


def parse_message_id(text: bytes) -> tuple[i64, i64]:
    """(pid, seq) of an id made here; (-1, -1) when it is not one."""
    pid: i64 = 0
    seq: i64 = 0
    digits: i64 = 0
    at: i64 = 0
    size: i64 = len(text)
    is_after_dash = False
    while at < size:
        byte: i64 = text[at]
        at += 1
        digit: i64
        if 0x30 <= byte <= 0x39:
            digit = byte - 0x30
        elif 0x61 <= byte <= 0x66:
            digit = byte - 0x57
        elif byte == 0x2D and not is_after_dash and digits:
            is_after_dash = True
            digits = 0
            continue
        else:
            return -1, -1
        digits += 1
        if digits > 15:
            return -1, -1
        if is_after_dash:
            seq = seq << 4 | digit
        else:
            pid = pid << 4 | digit
    if not is_after_dash or not digits:
        return -1, -1
    return pid, seq
