"""A line of figures per step on the console."""

from collections.abc import Mapping, Sequence

from rolemesh.engine.loggers.base import Logger


class Console(Logger):
    """The figures of `shown`, the step's time, and warnings."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.write(step_line(step, self.run.steps, metrics, self.run.shown))


def step_line(step: int, steps: int, metrics: Mapping[str, float], shown: Sequence[str]) -> str:
    """One line of figures for a person; the other loggers have all of them."""
    seconds = f" {metrics['timing_s/step']:.1f} s" if "timing_s/step" in metrics else ""
    figures = " ".join(f"{name} {metrics[name]:.4g}" for name in shown if name in metrics)
    empty = metrics.get("training/skipped_steps", 0)
    skipped = sum(value for name, value in metrics.items() if name.endswith("/skipped_steps")) - empty
    warning = f" | {skipped:.0f} updates skipped: their gradient was not finite" if skipped else ""
    if dropped := metrics.get("training/dropped_rows", 0):
        warning += f" | {dropped:.0f} samples left out: they or others of their prompt got no score"
        warning += ", so none was left and nothing learnt" if empty else ""
    return f"step {step}/{steps}{seconds} {figures}{warning}"
