"""What a job may be: every bad value is refused with one sentence, at every place where it means something."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit import launch
from toolkit.cli.launch import OPTIONAL_VALUES, _spec, add_arguments
from toolkit.cli.parser import Parser
from toolkit.errors import LaunchError
from toolkit.launch.record import Record
from toolkit.launch.spec import Host, parse_hosts

PLACES = {
    "local": {},
    "ssh": {"on": "ssh:a,b:2"},
    "slurm": {"on": "slurm"},
    "kubernetes": {"on": "kubernetes", "image": "i", "workers": 2},
}
BAD = [
    ({"command": ()}, "launch starts a script or a module, but none is named"),
    ({"command": ("-m",)}, "none is named"),
    ({"command": ("a\0b",)}, "it holds a NUL"),
    ({"workers": -1}, "--workers=-1, but it must be 0 or more"),
    ({"workers": 10**6}, "1000000 tasks of job worker, but that isn't a number of tasks"),
    ({"workers": None, "ps": 2}, "there is no chief or worker, so no task would train"),
    ({"workers": None, "evaluator": True}, "no task would train"),
    ({"max_restarts": -1}, "--max_restarts=-1, but it must be 0 or more. Give 0 or more"),
    ({"max_total_restarts": -1}, "--max_total_restarts=-1, but it must be 0 or more. Give 0 or more"),
    ({"max_total_restarts": 3}, "--max_total_restarts=3, but --max_restarts is 0, so the job never restarts"),
    ({"env": ("1A=x",)}, "--env='1A', but that can't be a variable's name"),
    ({"env": ("RANK=9",)}, "--env=RANK, but the launcher gives each task its own"),
    ({"env": ("NO_SUCH_VARIABLE",)}, "--env=NO_SUCH_VARIABLE, but it has no value here"),
    ({"env": ("A=\0",)}, "it holds a NUL"),
    ({"show": ("worker",)}, "worker"),
    ({"log_dir": "a\0"}, "it holds a NUL"),
    ({"start_timeout": -1.0}, "--start_timeout=-1.0, but it must be 0 seconds or more"),
    ({"start_timeout": float("nan")}, "it must be 0 seconds or more"),
    ({"stall_timeout": float("nan")}, "it must be 0 seconds or more"),
    ({"stall_floor": 0.0}, "--stall_floor=0.0, but it must be 1 seconds or more"),
    ({"grace": -1.0}, "it must be 0 seconds or more"),
    ({"heartbeat_timeout": 0.0}, "--heartbeat_timeout=0.0, but it must be 1 to 3600 seconds"),
    ({"task": ("worker:0",)}, "--task=worker:0 starts one task of a cluster, but no --cluster"),
    ({"cluster": "x.json", "workers": 1}, "both are given"),
    ({"min_workers": -1}, "--min_workers=-1, but it must be 0 or more"),
    ({"min_workers": 4}, "--min_workers=4, but the hosts have room for 3 tasks"),
    ({"min_workers": 1, "chief": True, "workers": 2}, "this job also has a chief"),
    ({"nodes": 0}, "--nodes=0, but it must be 1 or more"),
    ({"tasks_per_node": 0}, "--tasks_per_node=0, but it must be 1 or more"),
    ({"gpus_per_node": -1}, "--gpus_per_node=-1, but it must be 0 or more"),
    ({"gpus_per_node": 3, "gpus_per_task": 2}, "GPUs of each node would stay idle"),
    ({"gpus_per_task": -1}, "--gpus_per_task=-1, but it must be 0 or more"),
    ({"cpus_per_task": "4\n#SBATCH --exclusive"}, "that is"),
    ({"notice": 0}, "--notice=0, but it must be 1 seconds or more"),
    *(({"time": time}, f"--time={time}, but that is no time") for time in ("8h", "1:2:3:4", "", "1-")),
    ({"time": "2"}, "--time=2 with 120 s of notice, but tasks would get the notice to end as soon as they begin"),
    ({"partition": "a\nb"}, "that isn't a single line of a batch script"),
    ({"account": "a\nb"}, "that isn't a single line of a batch script"),
    ({"name": "x\n#SBATCH --exclusive"}, "that isn't a single line of a batch script"),
    ({"submit": ("qos=a\n#SBATCH --exclusive",)}, "that isn't a single line of a batch script"),
    ({"prefix": "nice '"}, "--prefix=\"nice '\", but a shell couldn't read it (no closing quotation)"),
    ({"submit": ("nodes=3",)}, "--sbatch=nodes=3, but the launcher sets that one itself"),
    ({"nodes": 2, "tasks_per_node": 2, "workers": 3}, "but the job has 3 tasks"),
    ({"nodes": 4, "workers": 2}, "there are 2 tasks to run there"),
    ({"rendezvous": "nowhere"}, "--rendezvous=nowhere, but that isn't an address. Write HOST:PORT"),
    ({"rendezvous": "a:1", "cluster": "x.json"}, "--cluster describes the hosts already"),
    ({"port": 80}, "--port=80, but it must be 1024 to 65535. Give 1024 to 65535"),
    ({"user": 0}, "--user=0, but it must be 1 or more"),
]
MEANS = {option.name: option.places for option in launch.options()}


def made(place, **changes):
    return launch.JobSpec(**{"command": ("train.py",), **PLACES[place], **changes})


def cases():
    for number, (changes, said) in enumerate(BAD):
        for place in PLACES:
            if all(place in MEANS.get(name, launch.PLACES) for name in changes):
                names = "-".join(changes)
                yield pytest.param(place, changes, said, id=f"{number}-{names}-{place}")


@pytest.mark.parametrize(("place", "changes", "said"), list(cases()))
def test_a_bad_value_is_refused_with_the_same_sentence_everywhere(place, changes, said):
    if place == "ssh" and "workers" in changes:
        changes = {**changes, "on": f"ssh:a:{min(9999, max(1, changes['workers'] or 1)) + changes.get('chief', 0)}"}
    with pytest.raises(LaunchError) as refused:
        made(place, **changes)
    assert said in str(refused.value)


def test_every_option_is_tried_with_a_bad_value_or_can_have_none():
    free = {"chief", "evaluator", "ps", "native_logs", "as_is", "snapshot", "setup", "open_network", "on"}
    texts = {
        "directory",
        "copy_to",
        "python",
        "preempt_when",
        "ssh_config",
        "account",
        "image",
        "namespace",
        "memory",
        "host",
    }
    tried = {name for changes, _ in BAD for name in changes}
    assert {option.name for option in launch.options()} - tried == (free | texts | {"volume", "patch"}) - tried


@pytest.mark.parametrize("option", launch.options(), ids=lambda option: option.name)
def test_what_means_nothing_at_a_place_is_refused_there(option):
    for place in set(PLACES) - set(option.places):
        odd = {"switch": not option.default, "several": ("x",), int: 7, float: 7.0, str: "x"}[option.kind]
        with pytest.raises(LaunchError, match=f"--{option.name}, but it applies only with"):
            made(place, **{option.name: odd})


@pytest.mark.parametrize("on", ["", "pbs", "local:a", "slurm:a", "Slurm"])
def test_a_place_that_is_none(on):
    with pytest.raises(LaunchError, match="--on="):
        made("local", on=on)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a", [("a", 1)]),
        ("a,b:2", [("a", 1), ("b", 2)]),
        ("me@node-1.example:8", [("me@node-1.example", 8)]),
        ("10.0.0.1:2,[fd00::1]:3", [("10.0.0.1", 2), ("fd00::1", 3)]),
    ],
)
def test_hosts_are_names_with_numbers_of_tasks(text, meant):
    assert [(host.name, host.tasks) for host in parse_hosts(text)] == meant
    assert made("ssh", on=f"ssh:{text}").hosts == tuple(Host(*each) for each in meant)


@pytest.mark.parametrize(
    "text",
    ["", "a,", "-oProxyCommand=x", "a b", "a;b", "$(x)", "a:0", "a:-1", "a:x", "a,a", "me@-x", "a\nb", "é", "a:99999"],
)
def test_what_is_no_host_is_refused(text):
    with pytest.raises(LaunchError, match="--on=ssh:"):
        made("ssh", on=f"ssh:{text}")


@given(st.text(max_size=30))
def test_any_text_is_hosts_or_refused(text):
    try:
        hosts = parse_hosts(text)
    except LaunchError:
        return
    assert all(host.name and not host.name.startswith("-") and host.tasks > 0 for host in hosts)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("60", 3600), ("2:30", 150), ("1:02:03", 3723), ("2-3", 183600), ("1-0:30", 88200), ("1-2:03:04", 93784)],
)
def test_a_time_is_as_long_as_slurm_has_it(time, seconds):
    made("slurm", time=time, notice=seconds - 1)
    with pytest.raises(LaunchError, match="the notice to end as soon as they begin"):
        made("slurm", time=time, notice=seconds)


@given(
    texts=st.lists(st.text(st.characters(exclude_characters="\0"), max_size=20), max_size=3),
    workers=st.sampled_from([None, 2]),
    as_is=st.booleans(),
    module=st.booleans(),
)
def test_the_same_is_asked_for_by_its_arguments(texts, workers, as_is, module):
    command = ("-m", "mine", *texts) if module else ("train.py", *texts)
    env = tuple(f"A{number}={text}" for number, text in enumerate(texts))
    spec = launch.JobSpec(command=command, env=env, workers=workers, as_is=as_is, grace=3.0)
    parser = Parser(prog="toolkit launch", optional_values=OPTIONAL_VALUES, add_help=False)
    add_arguments(parser)
    assert _spec(parser.parse_args(spec.arguments[1:])) == spec


def test_a_spec_comes_back_from_its_record(tmp_path):
    spec = made(
        "slurm",
        env=("A=\udcff é",),
        submit=("qos=long",),
        show=("worker:0",),
        nodes=2,
        time="1-12",
        log_dir=str(tmp_path),
    )
    assert Record(Record.begin(spec).directory).job()["spec"] == spec


def test_parameter_servers_bring_a_chief():
    spec = launch.JobSpec(command=("x",), workers=2, ps=1)
    assert spec.counts == (("chief", 1), ("worker", 2), ("ps", 1))
    assert launch.JobSpec(command=("x",), workers=2).counts == (("worker", 2),)
