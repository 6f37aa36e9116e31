"""The two forms of a client id: a number, or the name of a device that brings its own data."""

from __future__ import annotations

import re

# A name must not be a number: client-id='0' would otherwise be another client than client-id=0.
NAME = re.compile(r"(?!\d+$)[A-Za-z0-9._-]{1,64}")
ALLOWED_ID = "a whole number from 0, or a name of 1 to 64 letters, digits, '.', '_', '-' that is not a number"


def is_number(client: object) -> bool:
    """Whether a client id is a whole number from 0."""
    return isinstance(client, int) and not isinstance(client, bool) and client >= 0
