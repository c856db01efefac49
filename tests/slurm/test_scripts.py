"""Does every script of `slurm/` run as it is, and print what its own comment says?"""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.launch import ROOT
from tests.slurm.cluster import Cluster
from tests.tiers import thorough

Site = Callable[..., dict[str, str]]

SLURM = ROOT / "slurm"
DEVICES = {"one-process": 4, "two-nodes-wide": 4}  # GPUs of a process, where it is not one: CPU devices stand for them
SCRIPTS = sorted(path.stem for path in SLURM.glob("*.sh") if path.name != "site.sh")
PLAIN = [name for name in SCRIPTS if name not in ("all-reduce", "ibex", "jean-zay")]

# Lines that are not the program's: site.sh's, and Slurm's, whose cores here are made up, and which says so where it waits for a
# node that the step before has not given back, and where it asks a daemon again that did not answer in time. If asking again
# does not help, the job fails.
NOISE = (
    r"job \d+: |module |srun: cluster configuration lacks support for cpu binding"
    r"|srun: Job \d+ step creation temporarily disabled, retrying|srun: Step created for job \d+"
    r"|srun: error: slurm_receive_msgs: \S+ failed: Socket timed out on send/recv operation$"
)

# gloo writes its line piece by piece, so that those of two processes may be in each other. Then numbers are left.
GLOO = r"\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :"

# What runs in place of a container: it says how it was called, and runs the image's run script.
CONTAINER = """#!/bin/bash
echo "container: $*" >>"$CONTAINER_LOG"
while [ "$1" != "$SITE_IMAGE" ]; do shift; done
shift
exec "$SITE_PYTHON" "$@"
"""


def expected(name: str) -> list[str]:
    """The lines that a script's comment promises."""
    after = (SLURM / f"{name}.sh").read_text().split("# It prints", 1)[1].splitlines()[1:]
    promised = []
    for line in after:
        if not line.startswith("#   "):
            break
        promised.append(line.removeprefix("#   "))
    return promised


def printed(output: str) -> list[str]:
    """An output without blank lines, `NOISE`, and what gloo writes: where it does, lines of numbers alone too."""
    rest = re.sub(GLOO, "", output)
    noise = NOISE if rest == output else rf"{NOISE}|[\d ]+$"
    lines = (" ".join(line.split()) for line in rest.splitlines())
    return [line for line in lines if line and not re.match(noise, line)]


def compare(output: str, promised: list[str], *, all_of_it: bool = True) -> None:
    """Fail unless the lines are those promised, in any order; ``...`` stands for what differs from run to run.

    `all_of_it`: nothing else may be printed. The width of columns does not count.
    """
    left = printed(output)
    assert promised, "the script's comment says nothing"
    for line in promised:
        pattern = ".*".join(re.escape(part) for part in " ".join(line.split()).split("..."))
        found = next((one for one in left if re.fullmatch(pattern, one)), None)
        assert found is not None, f"missing: {line}\nin:\n{output}"
        left.remove(found)
    assert not (left and all_of_it), f"also printed: {left}"


def test_comments_are_compared() -> None:
    """Wrong if a line too few, too many or other would pass."""
    promised = ["I am 0, I see 1/2 devices", "sum ... J"]
    gloo = "[Gloo] Rank 0[Gloo] Rank 1 is connected to \n1 is connected to 1 peer ranks. 1\n peer ranks. "
    gloo += "Expected number of connected peer ranks is : Expected number of connected peer ranks is : 1\n1\n"
    right = "sum 3 J\nI am 0, I see 1/2 devices\n"
    compare("job 7: x\n" + gloo + right, promised)
    busy = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\nsrun: Step created for job 7\n"
    compare(busy + right, promised)
    slow = "srun: error: slurm_receive_msgs: [[localhost]:28248] failed: Socket timed out on send/recv operation\n"
    compare(slow + right, promised)
    for wrong in (
        f"1\n{right}",
        "sum 3 J\n",
        "sum 3 J\nI am 0, I see 1/1 devices\n",
        "sum 3 J\nI am 0, I see 1/2 devices\nsum 4 J\n",
        f"srun: error: n1: task 0: Exited with exit code 1\n{right}",
    ):
        with pytest.raises(AssertionError):
            compare(wrong, promised)


def test_every_script_is_tried() -> None:
    assert {*PLAIN, "all-reduce", "ibex", "jean-zay"} == {*SCRIPTS}
    for name in SCRIPTS:
        assert (SLURM / f"{name}.sh").stat().st_mode & stat.S_IXUSR
        assert f"{name}.sh" in (ROOT / "docs" / "slurm.md").read_text()


# To compile an FFT on eight processes takes long: tests/jobs/test_readme.py has the example, two-nodes the flags.
@pytest.mark.parametrize("name", thorough(PLAIN, ["pencil-fft"]))
def test_script(cluster: Cluster, site: Site, tmp_path: Path, name: str) -> None:
    """Wrong if a flag of the script, site.sh or shardload.initialize did not do what its comment says."""
    env = {**site(devices=DEVICES.get(name, 1)), "TRY_FOLDER": str(tmp_path)}
    compare(cluster.run(SLURM / f"{name}.sh", env=env).check().output, expected(name))


def test_modules_and_environment(cluster: Cluster, site: Site, tmp_path: Path) -> None:
    """Jean Zay's kind. Wrong if modules were not loaded, in a clean environment, before Python starts."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text(f"SITE_PYTHON={shlex.quote(site()['SITE_PYTHON'])}\n")
    env = {
        **site(),
        "BASH_FUNC_module%%": '() { echo "module $*" >&2; }',  # as a site's bash has it, exported
        "SITE_MODULES": "cuda/12.2.0 openmpi/4.1.5",
        "SITE_PYTHON": "no-such-python",
        "SITE_VENV": str(tmp_path),
        "SBATCH_ACCOUNT": "abc@v100",
    }
    output = cluster.run(SLURM / "jean-zay.sh", env=env).check().output
    assert [line for line in output.splitlines() if line.startswith("module")] == [
        "module purge",
        "module load cuda/12.2.0 openmpi/4.1.5",
    ]
    compare(output, expected("jean-zay"))


def test_container(cluster: Cluster, site: Site, tmp_path: Path) -> None:
    """Ibex's kind. No container runtime here: a program by its name notes its arguments and runs what the image would.

    So what is tried is srun and the command line, not the image.
    """
    program = tmp_path / "singularity"
    program.write_text(CONTAINER)
    program.chmod(0o755)
    image, log = tmp_path / "an image.sif", tmp_path / "log"
    env = {**site(), "SITE_IMAGE": str(image), "CONTAINER_LOG": str(log)}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    compare(cluster.run(SLURM / "ibex.sh", env=env).check().output, expected("ibex"))
    command = f"container: run --nv --bind {ROOT} --pwd {ROOT} {image} slurm/run.py slurm/hello.py"
    assert log.read_text().splitlines() == [command] * 8


def test_wrong_mpi_is_said(cluster: Cluster, site: Site) -> None:
    """Wrong if processes that are each alone passed for a job: the commonest mistake of all."""
    done = cluster.run(SLURM / "two-nodes-wide.sh", env={**site(devices=4), "SITE_MPI": "none"})
    assert done.state == "FAILED" and done.code != 0
    assert "every process believes that it is alone" in done.output and "--mpi=pmi2" in done.output
    assert "I am" not in done.output


def test_all_reduce(cluster: Cluster, site: Site) -> None:
    """Wrong if `shardload doctor` did not find eight processes on two nodes in order."""
    compare(cluster.run(SLURM / "all-reduce.sh", env=site()).check().output, expected("all-reduce"), all_of_it=False)
