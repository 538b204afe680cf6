"""What the command `toolkit` runs: seconds of imports, which Ctrl-C ends without a traceback."""

import signal


def main() -> None:
    """Import the command line, then run it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from toolkit.cli import commands

    signal.signal(signal.SIGINT, signal.default_int_handler)
    commands.main()


if __name__ == "__main__":
    main()
