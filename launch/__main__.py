"""`python -m rolemesh.launch`, and the console script `rolemesh`."""

from rolemesh.launch.process import end_with


def run() -> None:
    """The command line, as a process of its own."""
    from rolemesh.launch.cli import main

    end_with(main)


if __name__ == "__main__":
    run()
