"""What can go wrong for somebody at the command line; `main` turns each into a text on stderr and an exit code."""


class CliError(Exception):
    """The command cannot do what was asked; the text says why and what to do (exit 1)."""


class UsageError(CliError):
    """The command line itself is wrong (exit 2)."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM came while something was being waited for."""
