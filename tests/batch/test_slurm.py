"""The scripts for Slurm, with its commands played by others; and tasks of an array beside each other."""

import os
import subprocess
from pathlib import Path

import pytest

from ldm_lite.batch.options import BatchOptions
from ldm_lite.batch.places import Folder
from ldm_lite.batch.store import Store

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SRUN = """#!/bin/bash
echo "$@" > "$LOG/srun"
if [ "$WHAT" = time ]; then  # as --signal=B:USR1@60 does
    trap 'echo TERM > "$LOG/ended"; exit 143' TERM
    kill -USR1 $PPID
    for i in {1..400}; do sleep 0.05; done
fi
exit "$WHAT"
"""
SCONTROL = """#!/bin/bash
[ "$1" = show ] && echo node1 || echo "$@" >> "$LOG/scontrol"
"""


def submit(script: str, log: Path, what: object, **environment: str) -> int:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (log / name.upper()).mkdir(exist_ok=True)
        (log / name.upper() / name).write_text(text)
        (log / name.upper() / name).chmod(0o755)
    places = [log / "SRUN", log / "SCONTROL", os.environ["PATH"]]
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    job |= {"PATH": os.pathsep.join(map(str, places)), "LOG": str(log), "WHAT": str(what)} | environment
    return subprocess.run(["bash", str(EXAMPLES / script), "a", "b"], env=job, check=False, timeout=60).returncode


@pytest.mark.needs("bash")
@pytest.mark.parametrize("script", ["batch_array.slurm", "train.slurm"])
def test_a_job_whose_time_is_over_is_given_out_again(script: str, tmp_path: Path) -> None:
    array = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MAX": "16", "SLURM_ARRAY_JOB_ID": "9"}
    for status in (0, 1):
        assert submit(script, tmp_path, status, **array) == status
        assert not (tmp_path / "scontrol").exists()
    submit(script, tmp_path, "time", **array)
    assert (tmp_path / "ended").read_text() == "TERM\n", "the command has not ended itself"
    assert (tmp_path / "scontrol").read_text() == ("requeue 9_3\n" if script[0] == "b" else "requeue 7\n")


@pytest.mark.needs("bash")
def test_a_part_of_an_array_has_the_numbers_of_the_whole(tmp_path: Path) -> None:
    for more, shard in (({"SLURM_ARRAY_TASK_MAX": "16"}, "3/16"), ({"SLURM_ARRAY_TASK_MAX": "7", "OF": "16"}, "3/16")):
        array = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_JOB_ID": "9"}
        assert submit("batch_array.slurm", tmp_path, 0, **array, **more) == 0
        assert f"--shard {shard} " in (tmp_path / "srun").read_text()
        assert BatchOptions(prompts="a.txt", shard=shard).turn == (2, 16)


def test_a_task_removes_no_file_that_another_one_is_writing(tmp_path: Path) -> None:
    """Shards by their number; what all tasks write, such as the manifest, only if there is one process."""
    parts = [
        ".00000.tar.a1.part",
        ".00001.tar.a1.part",
        ".job.json.a1.part",
        ".empty.a1.part",
        "parts/.00003.jsonl.a.part",
    ]
    store = Store(Folder(tmp_path), ".tar")
    for which, of, kept in ((1, 2, [0, 2, 3]), (0, 2, [1, 2, 3, 4]), (0, 1, [])):
        for part in parts:
            (tmp_path / part).parent.mkdir(exist_ok=True)
            (tmp_path / part).touch()
        store.clean(which, of)
        assert [i for i, part in enumerate(parts) if (tmp_path / part).exists()] == kept
