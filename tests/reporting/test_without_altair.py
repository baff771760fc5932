"""Without the extra for charts the work is done, and a sentence says what is missing."""

import os
import subprocess
import sys


def test_a_missing_extra_is_said_after_the_work(tmp_path):
    (tmp_path / "altair.py").write_text("raise ModuleNotFoundError('No module named altair')\n")
    code = (
        "from pathlib import Path; from headwise.reporting.card import note_report; "
        f"print(*note_report(Path({str(tmp_path)!r})))"
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "No report: Charts need altair" in done.stdout + done.stderr
    assert not (tmp_path / "report.html").exists()
