"""The error response of a request: the headers by which a caller knows that its request failed.

A response with the user property `response-error` is an error, and the property its text.
`response-error-type` is optional, the name of the error's class. The payload is the text again, for
callers that do not know the properties. Any MQTT 5.0 client can send such a response.
"""

from __future__ import annotations

from typing import Final

RESPONSE_ERROR: Final = "response-error"
RESPONSE_ERROR_TYPE: Final = "response-error-type"
MAX_ERROR_CHARS: Final = 1000


def error_response(error: BaseException | str) -> tuple[str, dict[str, str]]:
    """Return payload and headers of the response to a request that failed."""
    text, error_type = str(error), "" if isinstance(error, str) else type(error).__name__
    text = "".join(one if one.isprintable() else " " for one in text)[:MAX_ERROR_CHARS]
    text = text or error_type or "the request failed"
    headers = {RESPONSE_ERROR: text}
    if error_type:
        headers[RESPONSE_ERROR_TYPE] = error_type
    return text, headers
