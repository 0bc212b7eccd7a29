"""Launchers as their variables look."""

import os
import re
import subprocess
import sys
import zlib
from dataclasses import replace

import pytest
import yaml
from helpers.commands import HERE, PYTHONPATH
from hypothesis import given
from hypothesis import strategies as st

from mheads.common.errors import UserError
from mheads.distributed.launcher import Launch, detect, first_host
from mheads.training.join_ranks import advise_srun

MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29511"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", **MASTER}
TORCHRUN = {**BY_HAND, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "3", "GROUP_WORLD_SIZE": "2"}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "PMIX_NAMESPACE": "1208614913", "PMIX_RANK": "2"}  # fmt: skip
SEVERAL_HOSTS = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "8"}
# What a batch script has; srun adds the step.
SBATCH = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "5", "SLURM_NPROCS": "5", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
          "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[08-10]", "SLURM_TASKS_PER_NODE": "2(x2),1"}  # fmt: skip
SALLOC = {**SBATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
SRUN = {**SBATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NODELIST": "n[08-10]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}  # fmt: skip
SRUN_HERE = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_STEP_NODELIST": "n09"}

BY_TORCHRUN = Launch("torchrun", 1, 4, 1, False, "n1", 29511, restart=3)
# Ranks of one host meet at a port of their job: 16384 + CRC-32 mod 16384.
BY_MPIRUN = Launch("mpirun", 2, 3, 2, True, port=16384 + zlib.crc32(b"1208614913") % 16384)
BY_SRUN = Launch("srun", 3, 5, 1, True, port=16384 + zlib.crc32(b"77.0") % 16384)
BY_SRUN_AGAIN = Launch("srun", 3, 5, 1, True, port=16384 + zlib.crc32(b"77.0.2") % 16384)
BY_MPICH = Launch("mpirun", 1, 2, 1, True, port=16384 + zlib.crc32(str(os.getppid()).encode()) % 16384)
AT_N1 = {"address": "n1", "port": 29511}
FOUND = {
    "nothing": ({}, None),
    "empty values": (dict.fromkeys(TORCHRUN, ""), None),
    "an address alone": (MASTER, None),
    "torchrun": (TORCHRUN, BY_TORCHRUN),
    "torchrun on one host": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, replace(BY_TORCHRUN, one_host=True)),
    "torchrun with a store": (
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, replace(BY_TORCHRUN, agent=True),
    ),
    "torchrun on each host of srun": ({**SRUN, **TORCHRUN}, BY_TORCHRUN),
    "torchrun on each host of mpirun": ({**OPEN_MPI, **TORCHRUN}, BY_TORCHRUN),
    "torchrun in a batch script": ({**SBATCH, **TORCHRUN, "GROUP_WORLD_SIZE": "1"}, BY_TORCHRUN),
    "torchrun among leftovers": ({**TORCHRUN, "PMI_RANK": "7"}, BY_TORCHRUN),
    "by hand, one process per host": (BY_HAND, Launch("env", 1, 4, 0, False, "n1", 29511)),
    "by hand, all here": ({**BY_HAND, "MASTER_ADDR": "localhost"}, Launch("env", 1, 4, 0, True, "localhost", 29511)),
    "by hand in a step of one task": (
        {**SRUN_HERE, **BY_HAND, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        Launch("env", 1, 4, 0, False, "n1", 29511),
    ),
    "by hand, as mpirun says": ({**OPEN_MPI, **MASTER, "RANK": "2", "WORLD_SIZE": "3"}, replace(BY_MPIRUN, **AT_N1)),
    "Open MPI": (OPEN_MPI, BY_MPIRUN),
    "Open MPI in salloc, its helpers started by srun": ({**SRUN, **OPEN_MPI}, BY_MPIRUN),
    "Open MPI with an address": ({**OPEN_MPI, **MASTER}, replace(BY_MPIRUN, **AT_N1)),
    "Open MPI on one host, an address without a port": ({**OPEN_MPI, "MASTER_ADDR": "n1"}, BY_MPIRUN),
    "Open MPI on several hosts": (
        {**SEVERAL_HOSTS, "MASTER_ADDR": "n1"},
        replace(BY_MPIRUN, local_rank=0, one_host=False, address="n1", port=29500),
    ),
    "Open MPI with half of torchrun's, which agrees": ({**OPEN_MPI, "WORLD_SIZE": "3"}, BY_MPIRUN),
    "MPICH, Intel MPI": (MPICH, BY_MPICH),
    "MPICH, its helpers started by srun": ({**SRUN, **MPICH}, BY_MPICH),
    "srun on one host": (SRUN_HERE, BY_SRUN),
    "srun, a job that was put back": ({**SRUN_HERE, "SLURM_RESTART_COUNT": "2"}, BY_SRUN_AGAIN),
    "srun with fewer tasks than the job": (
        {**SRUN_HERE, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}, replace(BY_SRUN, size=4),
    ),
    "srun --mpi=pmi2": ({**SRUN_HERE, "PMI_RANK": "3", "PMI_SIZE": "5"}, BY_SRUN),
    "srun --mpi=pmix": ({**SRUN_HERE, "PMIX_RANK": "3"}, BY_SRUN),
    "srun on several hosts, with an address": ({**SRUN, **MASTER}, replace(BY_SRUN, one_host=False, **AT_N1)),
    "a batch script": (SBATCH, None),
    "a batch script, its step as a signed number": ({**SBATCH, "SLURM_STEP_ID": "-5"}, None),
    "the shell of salloc": (SALLOC, None),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_each_launcher_is_recognised_by_its_variables(name):
    environ, expected = FOUND[name]
    assert detect(environ) == expected


def test_srun_on_several_hosts_meets_on_the_first_at_a_port_of_the_job():
    found = detect(SRUN)
    assert found == replace(BY_SRUN, one_host=False, address="n08", port=found.port)
    assert 16384 <= found.port < 32768
    first = detect({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert (first.address, first.port) == (found.address, found.port)
    assert detect({**SRUN, "SLURM_STEP_ID": "1"}).port != found.port


def without(environ, text):
    return {name: value for name, value in environ.items() if text not in name}


WRONG = {
    "half": ({"RANK": "1"}, "RANK=1 without WORLD_SIZE, MASTER_ADDR, MASTER_PORT: start with torchrun"),
    "other half": ({"WORLD_SIZE": "4", **MASTER}, "MASTER_ADDR=n1, MASTER_PORT=29511 without RANK: start"),
    "no port": (without(BY_HAND, "PORT"), "RANK=1, WORLD_SIZE=4, MASTER_ADDR=n1 without MASTER_PORT"),
    "no number": ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not a whole number"),
    "no such rank": ({**TORCHRUN, "RANK": "4"}, "RANK=4, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2 cannot be"),
    "negative": ({**TORCHRUN, "RANK": "-1"}, "RANK=-1, WORLD_SIZE=4"),
    "local rank": ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4, LOCAL_WORLD_SIZE=2 cannot be"),
    "port": ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a port"),
    "by hand against Open MPI": (
        {**OPEN_MPI, **BY_HAND}, "RANK=1, WORLD_SIZE=4, but mpirun says rank 2 of 3: unset RANK and WORLD_SIZE",
    ),
    "one for all, inherited through mpirun": (
        {**OPEN_MPI, **BY_HAND, "RANK": "0", "WORLD_SIZE": "3"}, "RANK=0, WORLD_SIZE=3, but mpirun says rank 2 of 3",
    ),
    "half against srun": ({**SRUN, "WORLD_SIZE": "4"}, "WORLD_SIZE=4, but srun says rank 3 of 5"),
    "copies of torchrun": (
        {**SRUN, **TORCHRUN, "GROUP_WORLD_SIZE": "1"},
        "srun started 5 copies of torchrun, which know nothing of each other (GROUP_WORLD_SIZE=1): give them --nnodes",
    ),
    "Open MPI, size missing": (
        {"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK=0 without OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL",
    ),
    "MPICH, local rank missing": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "without MPI_LOCALRANKID, MPI_LOCALNRANKS"),
    "Open MPI on several hosts": (SEVERAL_HOSTS, "mpirun -x MASTER_ADDR=<host of rank 0>"),
    "srun, rank missing": (without(SRUN, "PROCID"), "without SLURM_PROCID: start with srun"),
    "srun, hosts": ({**SRUN, "SLURM_STEP_NODELIST": "n[1-"}, "'n[1-' is not a list of hosts"),
    "srun, no hosts": (without(SRUN, "NODELIST"), "the ranks are on several hosts, and nothing says where they meet"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_variables_that_cannot_be_are_refused_with_their_values_and_a_remedy(name):
    environ, message = WRONG[name]
    with pytest.raises(UserError) as caught:
        detect(environ)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_forgotten_srun_is_one_process_that_says_so():
    for forgotten in (SBATCH, SALLOC):
        assert detect(forgotten) is None
        assert "SLURM_NTASKS=5" in advise_srun(forgotten) and "srun starts 5" in advise_srun(forgotten)
    for meant in ({**SBATCH, "SLURM_NTASKS": "1"}, {}):
        assert advise_srun(meant) is None


HOSTS = {
    "login": "login", "a,b": "a", "node[003-005,7],other": "node003", "n[9-11]": "n9", "n[5,9-11,13]": "n5",
    "r[1-2]n[1,3]-ib.site": "r1n1-ib.site",
}  # fmt: skip


def test_the_scripts_in_the_docs_start_ranks(mheads):
    """Shell that can be parsed, and pods whose variables make them ranks; the commands are those of `mheads`."""
    text = (HERE.parent / "docs/distributed.md").read_text().partition("## On a cluster")[2].partition("\n## ")[0]
    slurm, torchrun, kubernetes = re.findall(r"```(?:bash|yaml)\n(.*?)```", text, re.DOTALL)
    for script in (slurm, torchrun):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        assert "mheads train cifar10_quick split=conv2" in script
    service, job = yaml.safe_load_all(kubernetes)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    environ = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
    assert environ["RANK"] == {"fieldRef": {"fieldPath": index}}
    launch = detect({**environ, "RANK": "2"})
    address = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert launch == Launch("env", 2, job["spec"]["completions"], 0, False, address, 29500)
    command, folder = container["command"][1:], container["command"].index("--folder")
    done = mheads("config", *command[1 : folder - 1])
    assert done.code == 0 and "timeout: 600" in done.out


@pytest.mark.parametrize("text", HOSTS)
def test_the_first_of_a_list_of_hosts_is_found(text):
    assert first_host(text) == HOSTS[text]


@pytest.mark.parametrize("text", ["", "n[", "n]", "n[]", "n[1-]", "n[a-b]", ",b", "n[1,2", "a b"])
def test_a_list_of_hosts_that_is_none_is_refused(text):
    with pytest.raises(UserError, match="not a list of hosts"):
        first_host(text)


RANGES = st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.integers(0, 12), st.integers(1, 4))


@given(st.lists(RANGES, min_size=1, max_size=8))
def test_the_first_of_any_list_of_ranges_is_their_first_number(ranges):
    text = ",".join(f"{name}[{first:0{width}}-{first + more:0{width}}]" for name, first, more, width in ranges)
    name, first, _, width = ranges[0]
    assert first_host(text) == f"{name}{first:0{width}}"


def test_torchrun_hands_every_option_of_train_on_to_us():
    """It reads the whole command, and takes what begins one of its own options for that option."""
    from torch.distributed.run import get_args_parser
    from typer.main import get_command

    from mheads.cli.main import app

    parameters = get_command(app).commands["train"].params
    ours = [name for one in parameters if one.param_type_name == "option" for name in (*one.opts, *one.secondary_opts)]
    assert {"--folder", "-f", "--run", "-r", "--force", "--quiet"} <= set(ours)
    for name in set(ours) - {"--run"}:  # kept for those who are used to it
        command = ["train", "digits", "split=conv1", name, "value"]
        parsed = get_args_parser().parse_args(["--nproc-per-node", "2", "-m", "mheads", *command])
        assert (parsed.module, parsed.training_script_args) == (True, command)


def test_the_old_name_of_the_folder_is_still_taken(mheads, tmp_path):
    for name in ("-f", "--run"):
        done = mheads("train", "digits", "optim.iterations=1", "data.limit=100", name, tmp_path / f"run{name}")
        assert done.code == 0
        assert (tmp_path / f"run{name}" / "result.json").is_file()


def test_torch_is_told_to_be_brief_about_lost_ranks_before_it_is_imported():
    """It reads that once: later it prints pages of addresses for each rank that is lost."""
    code = "import os, sys, mheads.cli.main as cli; sys.argv = ['mheads', 'train'];"
    code += "cli.app = lambda: print('torch' in sys.modules, os.environ.get('TORCH_CPP_LOG_LEVEL')); cli.main()"
    ranks = {**OPEN_MPI, "PYTHONPATH": PYTHONPATH}
    for environ, expected in ((ranks, "False ERROR"), (ranks | {"TORCH_CPP_LOG_LEVEL": "INFO"}, "False INFO")):
        found = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
        assert found.stdout.strip() == expected, found.stderr
