"""Errors that a user can fix: one line on standard error and exit status 2, never a traceback."""

import contextlib
import os
import sys
from collections.abc import Iterator


class UserError(Exception):
    """Something that the user can fix. The message is one line: what is wrong, where, and what to do."""


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn a `UserError` into its message and exit status 2, Ctrl-C into status 130, and ignore a closed pipe."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader closed it (`| head`); without this Python reports it again on exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr)
        sys.exit(130)
