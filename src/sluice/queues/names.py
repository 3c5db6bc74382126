"""Names of queues and groups, and ids of messages: validation, formatting and parsing."""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, write_i64_be
from mypy_extensions import i64

DLQ_PREFIX: Final = "dlq/"
REPLY_QUEUE_PREFIX: Final = "responses/"
_USER_SEPARATOR: Final = "\0"  # no client id has it [MQTT-1.5.4-2]

_HEX: Final = b"0123456789abcdef"


def queue_name_error(name: str) -> str:
    """Return why a queue cannot have this name, or the empty string if it can."""
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
    """Return whether HTTP clients and proxies drop this level from a path."""
    return text == "." or text == ".."


def new_queue_name_error(name: str) -> str:
    """Return why a queue cannot be created with this name, or the empty string if it can.

    Queues that an older version created keep such a name.
    """
    if any(is_dot_segment(level) for level in name.split("/")):
        return "no level of a queue name may be '.' or '..', because REST paths lose such a level"
    return queue_name_error(name)


def new_group_name_error(name: str) -> str:
    """Return what to do about an invalid name of a new group, or the empty string."""
    if is_dot_segment(name):
        return "Give another consumer-group than '.' and '..', because REST paths lose such a name"
    return group_name_error(name)


def group_name_error(name: str) -> str:
    """Return what to do about an invalid group name, or the empty string."""
    if not name or len(name) > 256 or any(character in name for character in "/+#$"):
        return "Give 1 to 256 characters without / + # and $"
    return "" if is_printable(name) else "Give a name without control characters"


def make_identity(client: str, user: str) -> str:
    """Return the identity to which deliveries are bound: the client id and, if any, the user.

    A client id alone is no proof: when its session has ended, a client of any user can connect with
    it.
    """
    return client + _USER_SEPARATOR + user if user else client


def client_id_of(identity: str) -> str:
    """Return the client id of an identity."""
    return identity.partition(_USER_SEPARATOR)[0]


def is_printable(name: str) -> bool:
    """Return whether a packet can carry a name and a terminal can show it.

    Control characters and surrogates are not printable.
    """
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
    """Return a 32-bit number as eight hex digits in ASCII, the first digit in the highest byte.

    Each step doubles the distance between the parts of the number, until each byte holds four bits.
    """
    value = (value | (value << 16)) & 0x0000_FFFF_0000_FFFF
    value = (value | (value << 8)) & 0x00FF_00FF_00FF_00FF
    value = (value | (value << 4)) & 0x0F0F_0F0F_0F0F_0F0F
    # 1 where a digit is above 9
    above_nine: i64 = ((value + 0x0606_0606_0606_0606) >> 4) & 0x0101_0101_0101_0101
    return value + 0x3030_3030_3030_3030 + above_nine * 0x27


def format_message_id(pid: i64, seq: i64) -> bytes:
    """Return the id of a message whose publisher gave none. It is unique in its store forever."""
    out = BytesWriter()
    write_hex(out, pid)
    out.append(0x2D)
    write_hex(out, seq)
    return out.getvalue()


def parse_message_id(text: bytes) -> tuple[i64, i64]:
    """Parse an id made by `format_message_id`; return (pid, seq), or (-1, -1) if it is not one."""
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


def looks_generated(client_id: str) -> bool:
    """Return whether a client id seems to be made for one run of a client.

    The last part of such an id is long, with digits between other characters.
    """
    last = client_id.replace("-", "_").replace("/", "_").rpartition("_")[2]
    digits = sum(one.isdigit() for one in last)
    is_hex = all(one in "0123456789abcdefABCDEF" for one in last)
    return 0 < digits < len(last) and len(last) >= (8 if is_hex else 16)
