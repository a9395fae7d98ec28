from pathlib import Path

import pytest

from rolemesh.placement.appending import append_whole


def test_text_is_added_at_the_end_and_a_full_disk_is_an_error(tmp_path):
    file = tmp_path / "lines"
    append_whole(file, "á\n")
    append_whole(file, "b\n")
    assert file.read_text() == "á\nb\n"
    with pytest.raises(OSError, match="No space left"):
        append_whole(Path("/dev/full"), "c\n")
