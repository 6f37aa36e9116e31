"""The one exception for everything a user can put right: a wrong key, missing data, an impossible shape."""


class PbflError(Exception):
    """One clear line for the person at the keyboard: what is wrong, where, and what is allowed.

    Raised before anything starts. The command line prints the text without a traceback.
    """
