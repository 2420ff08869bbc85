"""Errors that a user can mend: one sentence on standard error and exit status 2, never a traceback."""

import contextlib
import os
import sys
from collections.abc import Iterator


class UserError(Exception):
    """One sentence that says what was wrong, where, and what to do."""


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """End the program with the sentence and status 2 when a `UserError` comes up, quietly with 130 after Ctrl-C."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader has gone (`| head`); the interpreter would complain once more as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr)
        sys.exit(130)
