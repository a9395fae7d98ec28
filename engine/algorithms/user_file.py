"""A user's own estimators and losses: a Python file that registers them when it is loaded."""

from rolemesh.engine.user_file import load_file


def load_algorithm_file(path: str | None) -> None:
    """Run the Python file of `algorithm.file`, once in a process; None is no file.

    It registers with `register_estimator` and `register_policy_loss`. Raises UserFileError.
    """
    if path is not None:
        load_file(path, "algorithm.file")
