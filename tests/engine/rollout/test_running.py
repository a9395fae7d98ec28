"""How many responses are still being written, as a timeline gets it."""

from rolemesh.engine.rollout.running import MOST_POINTS, Running


def test_every_end_of_few_is_a_point():
    running = Running(3)
    for n in (1, 2):
        running.ended(n)
    assert [left for _, left in running.points] == [3, 2, 0]
    assert running.points[0][0] == 0.0


def test_many_ends_make_few_points_with_the_last_among_them():
    running = Running(1000)
    for _ in range(1000):
        running.ended(1)
    assert len(running.points) <= 2 * MOST_POINTS
    assert running.points[-1][1] == 0
