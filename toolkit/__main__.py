"""What the command `toolkit` runs: seconds of imports, which Ctrl-C ends without a traceback."""

import signal


def main() -> None:
    """Import the command line, then run it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from toolkit import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
