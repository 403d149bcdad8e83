"""`baton doctor`: what facts mean (pure), the planned stack, and a running one behind real HTTP."""

import json
import socket
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from baton_cli.__main__ import build_parser
from baton_cli.doctor import links, machine, model, planned, ports, running, software
from baton_cli.doctor.command import doctor, read_key
from baton_cli.doctor.findings import Finding, Level
from baton_cli.doctor.software import Device, ModelFacts, Need, Requirement, TorchFacts
from baton_cli.errors import UsageError
from baton_cli.fetch import Reply, Unreachable, fetch
from baton_cli.layout import UpOptions, parse_setting
from baton_cli.show import Screen
from baton_core.fingerprint import fingerprint
from unit.canned_http import Answers, serving

GIB = 1024**3
FACTS = machine.MachineFacts(
    python=(3, 11, 7),
    executable="/usr/bin/python3",
    cores=8,
    cores_limit=None,
    memory_free_bytes=16 * GIB,
    memory_total_bytes=32 * GIB,
    shm_bytes=16 * GIB,
    locked_bytes_limit=None,
    files_limit=65_536,
    files_hard_limit=65_536,
    clock_synchronised=True,
)
SMOLLM = ModelFacts(
    architecture="llama",
    parameters=134_500_000,
    layers=30,
    query_heads=9,
    kv_heads=3,
    context_tokens=8_192,
    numbers_a_token=2 * 30 * 3 * 64,
)
CPU_TORCH = TorchFacts(version="2.13.0+cpu", cuda_build=None, cpu="AVX512")


def judged(demand: machine.Demand | None = None, **changes: Any) -> dict[str, Finding]:
    findings = machine.judge(replace(FACTS, **changes), demand or machine.Demand())
    return {finding.name: finding for finding in findings}


# -- the machine


def test_a_good_machine_has_nothing_to_complain_about() -> None:
    assert {finding.level for finding in judged(machine.Demand(ranks=2, memory_bytes=GIB)).values()} == {Level.OK}


def test_an_old_python_fails_and_says_how_to_take_another() -> None:
    found = judged(python=(3, 10, 1))["python"]
    assert found.level is Level.FAIL and "3.11 or later" in found.text and "PYTHON=python3.11" in found.advice


def test_fewer_cores_than_ranks_warn_and_a_container_s_limit_counts() -> None:
    assert judged(machine.Demand(ranks=9))["cores"].level is Level.WARN
    found = judged(machine.Demand(ranks=2), cores_limit=1.5)["cores"]
    assert found.level is Level.WARN and "1.5, by the limit of this container (it sees 8)" in found.text


def test_memory_is_compared_with_what_the_workers_need() -> None:
    assert judged(machine.Demand(memory_bytes=15 * GIB))["memory"].level is Level.WARN
    found = judged(machine.Demand(memory_bytes=17 * GIB))["memory"]
    assert found.level is Level.FAIL
    assert "16.0 GiB of 32.0 GiB free" in found.text and "17.0 GiB" in found.text and "kv_tokens" in found.advice


def test_a_small_shm_matters_only_where_nccl_uses_it() -> None:
    assert judged(shm_bytes=64 * 1024**2)["/dev/shm"].level is Level.OK
    found = judged(machine.Demand(uses_nccl=True), shm_bytes=64 * 1024**2)["/dev/shm"]
    assert found.level is Level.WARN and "64 MiB" in found.text and "--shm-size=1g" in found.advice
    assert judged(machine.Demand(uses_nccl=True), shm_bytes=None)["/dev/shm"].level is Level.FAIL


def test_a_low_limit_of_files_says_how_many_requests_that_is() -> None:
    found = judged(files_limit=1_024, files_hard_limit=524_288)["open files"]
    assert found.level is Level.WARN and "341 at once" in found.text and found.advice == "ulimit -n 65536"
    assert judged(files_limit=256, files_hard_limit=256)["open files"].level is Level.FAIL


def test_this_very_machine_can_be_looked_at() -> None:
    facts = machine.look()
    assert facts.cores >= 1 and 0 < facts.memory_free_bytes <= facts.memory_total_bytes


def test_the_limits_of_a_container_are_read_from_its_cgroup(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8000 kB\nMemAvailable: 6000 kB\nHugePages_Total: 0\n")
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    for name, text in {
        "cpu.max": "150000 100000",
        "memory.max": str(5_000_000),
        "memory.current": str(3_000_000),
        "memory.stat": "anon 1\ninactive_file 500000\n",
    }.items():
        (cgroup / name).write_text(text)
    facts = machine.look(tmp_path)
    assert (facts.cores_limit, facts.memory_free_bytes, facts.memory_total_bytes) == (1.5, 2_500_000, 8_192_000)
    assert facts.shm_bytes is None


# -- software


WANTED = [
    Requirement(name="msgspec", least="0.18", extra=""),
    Requirement(name="aiohttp", least="3.10", extra=""),
    Requirement(name="safetensors", least="0.4", extra="engine"),
    Requirement(name="torch", least="2.4", extra="engine"),
    Requirement(name="pytest", least="8", extra="dev"),
]


def packages(versions: dict[str, str], *, engine_needed: bool = True) -> list[tuple[Level, str]]:
    findings = software.judge_packages(WANTED, versions.get, engine_needed=engine_needed)
    return [(finding.level, finding.text) for finding in findings]


def test_packages_that_are_missing_or_too_old_are_named() -> None:
    found = packages({"msgspec": "0.18.6", "aiohttp": "3.9.5"})
    assert found == [
        (Level.FAIL, "aiohttp is 3.9.5, needed is 3.10 or later"),
        (Level.FAIL, "safetensors is missing"),
    ]


def test_a_front_end_without_engine_packages_is_well() -> None:
    found = packages({"msgspec": "0.18", "aiohttp": "3.10.0"}, engine_needed=False)
    assert [level for level, _ in found] == [Level.OK, Level.OK] and "no worker" in found[1][1]


def test_our_own_metadata_is_understood() -> None:
    names = {(one.name, one.extra) for one in software.requirements()}
    assert {("msgspec", ""), ("torch", "engine"), ("matplotlib", "bench")} <= names
    assert all(one.least for one in software.requirements() if one.name in ("msgspec", "torch"))


@pytest.mark.parametrize(
    ("found", "is_needed", "wants_cuda", "has_driver", "level", "word"),
    [
        (CPU_TORCH, True, False, False, Level.OK, "no CUDA device"),
        (CPU_TORCH, True, False, True, Level.WARN, "NVIDIA driver"),
        (CPU_TORCH, True, True, True, Level.FAIL, "built without CUDA"),
        (TorchFacts(version="2.13", cuda_build="12.8", cpu="AVX2"), True, True, True, Level.FAIL, "sees no device"),
        (
            TorchFacts(
                version="2.13",
                cuda_build="12.8",
                cpu="AVX2",
                devices=[Device(name="H200", free_bytes=140 * GIB, total_bytes=141 * GIB)],
            ),
            True, True, True, Level.OK, "H200 141 GiB",
        ),
        ("ModuleNotFoundError: No module named 'torch'", True, False, False, Level.FAIL, "not installed"),
        ("ModuleNotFoundError: No module named 'torch'", False, False, False, Level.OK, "router and registry"),
        ("ImportError: libcudart.so.12", True, False, False, Level.FAIL, "libcudart"),
    ],
)  # fmt: skip
def test_torch_is_judged_by_what_the_workers_are_to_use(
    found: TorchFacts | str, is_needed: bool, wants_cuda: bool, has_driver: bool, level: Level, word: str
) -> None:
    finding = software.judge_torch(found, is_needed=is_needed, wants_cuda=wants_cuda, has_driver=has_driver)
    assert finding.level is level and word in finding.text
    assert bool(finding.advice) is (level is not Level.OK)


# -- the model


def test_the_packaged_model_is_found_and_whole() -> None:
    found = model.locate("smollm2-135m-instruct", {})
    assert found.finding.level is Level.OK and found.path is not None and found.path.suffix == ".gguf"


def test_a_file_that_was_cut_off_is_not_taken_for_a_model(tmp_path: Path) -> None:
    whole = model.locate("smollm2-135m-instruct", {}).path
    assert whole is not None
    cut = tmp_path / "cut.gguf"
    with whole.open("rb") as content:
        cut.write_bytes(content.read(8_000_000))
    found = model.locate(str(cut), {})
    assert found.path is None and found.finding.level is Level.FAIL and "cut off: 8,000,000 bytes" in found.finding.text


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/model.gguf", "./nothing/here"])
def test_a_model_that_is_not_there_fails(name: str) -> None:
    assert model.locate(name, {}).finding.level is Level.FAIL


def test_a_hub_model_is_looked_for_in_the_cache_and_never_downloaded(tmp_path: Path) -> None:
    away = model.locate("Qwen/Qwen3-0.6B", {"HF_HOME": str(tmp_path)})
    assert away.finding.level is Level.WARN and away.finding.advice == "hf download Qwen/Qwen3-0.6B"
    folder = tmp_path / "hub/models--Qwen--Qwen3-0.6B/snapshots/abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert model.locate("qwen3-0.6b", {"HF_HOME": str(tmp_path)}).finding.text.endswith("no *.safetensors")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    (folder / "tokenizer.json").write_text("{}")
    assert "pointer of Git LFS" in model.locate("qwen3-0.6b", {"HF_HOME": str(tmp_path)}).finding.text
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(64))
    assert model.locate("qwen3-0.6b", {"HF_HOME": str(tmp_path)}).path == folder


def test_the_model_s_line_says_which_tensor_parallel_sizes_its_heads_permit() -> None:
    finding = model.judge_model(replace_model(CPU_TORCH, SMOLLM), ["bfloat16"])
    assert finding is not None and finding.level is Level.OK
    assert "tp may be 1, 3, 9" in finding.text and "23,040 bytes of KV a token in bfloat16" in finding.text


def replace_model(torch: TorchFacts, facts: ModelFacts) -> TorchFacts:
    return TorchFacts(
        version=torch.version, cuda_build=torch.cuda_build, cpu=torch.cpu, devices=torch.devices, model=facts
    )


def test_what_the_engine_refuses_is_a_failure_in_its_own_words() -> None:
    refused = TorchFacts(version="2", cuda_build=None, cpu="", refused="cannot serve a model of architecture 'gemma'")
    finding = model.judge_model(refused, ["bfloat16"])
    assert finding is not None and finding.level is Level.FAIL and "gemma" in finding.text


# -- the planned stack


def planned_with(*settings: str, **options: Any) -> planned.Planned:
    return planned.planned(UpOptions(settings=tuple(map(parse_setting, settings)), **options), {})


def test_the_plan_is_what_baton_up_would_start() -> None:
    stack = planned_with("prefill.kv_tokens=1024", prefill=2, decode=1, dtype="float32")
    assert [config.kv_tokens for config in stack.configs] == [1024, 1024, 32_768]
    assert stack.ranks == 3 and stack.dtypes == ("float32",) and not stack.wrong and not stack.wants_cuda


def test_a_setting_that_a_worker_would_refuse_is_found_before_it_starts() -> None:
    stack = planned_with("decode.kv_tokens=7")
    assert len(stack.configs) == 1
    assert "decode 0 would refuse" in stack.wrong[0].text and "kv_tokens" in stack.wrong[0].text
    stack = planned_with("prefill.kv_token=7")
    assert "did you mean BATON_PREFILL_KV_TOKENS" in stack.wrong[0].text


def test_variables_of_the_caller_count_as_they_would_for_baton_up() -> None:
    stack = planned.planned(UpOptions(), {"BATON_PREFILL_KV_TOKENS": "2048", "PATH": "/bin"})
    assert [config.kv_tokens for config in stack.configs] == [2_048, 32_768]


NEEDS = [Need(weight_bytes=300_000_000, pool_bytes=230_400_000), Need(weight_bytes=300_000_000, pool_bytes=460_800_000)]


def test_memory_is_that_of_weights_and_pools_of_all_workers() -> None:
    stack = planned_with("prefill.kv_tokens=10000", "decode.kv_tokens=20000")
    need = planned.demand(stack, NEEDS)
    assert need.ranks == 2 and not need.uses_nccl
    assert need.memory_bytes == 2 * (planned.PROCESS_BYTES + 300_000_000) + 30_000 * 23_040
    assert planned.demand(stack, []).memory_bytes == 0, "nobody could say"


def test_cuda_workers_take_memory_of_the_devices_not_of_the_host() -> None:
    stack = planned_with("prefill.device=cuda", "decode.device=cuda", "decode.tp=2")
    need = planned.demand(stack, NEEDS)
    assert stack.wants_cuda and need.memory_bytes == 3 * planned.PROCESS_BYTES and need.uses_nccl
    small = TorchFacts(
        version="2",
        cuda_build="12",
        cpu="",
        devices=[Device(name="T4", free_bytes=GIB, total_bytes=GIB)],
        needs=NEEDS,
    )
    (finding,) = planned.device_findings(stack, small)
    assert finding.level is Level.FAIL and "1.0 GiB free on 1 devices" in finding.text


def test_ranks_that_the_model_cannot_be_shared_among_are_found_before_they_start() -> None:
    stack = planned_with("decode.tp=2", prefill=2)
    needs = [NEEDS[0], NEEDS[0], Need(refused="9 query heads do not divide by tp 2")]
    alike, refused = planned.need_findings(stack, needs)
    assert alike.level is Level.OK and alike.name == "prefill ranks" and "one rank" in alike.text
    assert refused.level is Level.FAIL and refused.text.startswith("tp 2: 9 query heads")
    assert refused.advice.startswith("--set decode.tp=")


def test_a_taken_port_fails_and_names_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = planned.port_finding(port)
        assert ports.listener(port) is not None
    assert finding.level is Level.FAIL and "pid" in finding.text and f"--port {port + 1}" in finding.advice


def test_folders_that_cannot_be_written_or_are_not_there_are_named(tmp_path: Path) -> None:
    stack = planned_with(f"decode.shm_dir={tmp_path / 'sockets'}")
    state, temporary, sockets = planned.folder_findings(stack, tmp_path / "state")
    assert (state.level, temporary.level) == (Level.OK, Level.OK) and str(tmp_path / "state") in state.text
    assert sockets.level is Level.FAIL and "would travel by tcp" in sockets.text
    (tmp_path / "sockets").mkdir()
    assert planned.folder_findings(stack, tmp_path)[2].level is Level.OK


# -- a running stack

PRINT = {"layers": 30, "kv_heads": 3, "dtype": "bfloat16", "weight_revision": "abc"}


@dataclass
class FakeStack:
    """What each process answers; tests change it."""

    router: Answers
    registry: Answers
    prefill: Answers
    decode: Answers
    urls: dict[str, str]

    def findings(self, *argv: str) -> tuple[int, dict[str, Any]]:
        """Exit code, and what --json says."""
        out = StringIO()
        code = doctor(options("--url", self.urls["router"], "--json", *argv), {}, Screen(out))
        return code, json.loads(out.getvalue())

    def bad(self, *argv: str) -> list[dict[str, str]]:
        """What is not well, but for this machine."""
        _, said = self.findings(*argv)
        sections = [one for one in said["sections"] if one["title"] != "This machine"]
        return [finding for one in sections for finding in one["findings"] if finding["level"] != "ok"]


def options(*argv: str) -> Namespace:
    return build_parser().parse_args(["doctor", *argv])


def worker(role: str, **info: Any) -> Answers:
    said = {
        "role": role,
        "incarnation": f"{role}-life",
        "instance": f"{role}-life",
        "version": "0.1.0",
        "model": "smollm2",
        "fingerprint": fingerprint(PRINT),
        "page_tokens": 16,
        "kv_pages": 2048,
    }
    return {"/server_info": said | info, "/ready": {"ready": True, "reasons": []}}


def rank_route(tp: int) -> str:
    return links.RankAddress(instance="prefill-life", numbers=(0, 0, tp, 0)).route("")


@pytest.fixture
def stack() -> Iterator[FakeStack]:
    prefill, decode, registry = worker("prefill"), worker("decode"), Answers()
    router: Answers = {"/health": {}, "/ready": {"ready": True, "reasons": []}}
    with serving(prefill) as prefill_url, serving(decode) as decode_url, serving(registry) as registry_url:
        host, _, port = prefill_url.removeprefix("http://").partition(":")
        registry["/v1/instances"] = {
            "instances": [
                {
                    "instance": "prefill-life",
                    "incarnation": "prefill-life",
                    "ready": True,
                    "ranks_registered": 1,
                    "ranks_total": 1,
                    "layout": {"dp_size": 1, "attn_tp_size": 1, "attn_cp_size": 1, "pp_size": 1},
                    "http_host": host,
                    "http_port": int(port),
                }
            ]
        }
        # Anything that accepts connections will do as a rank.
        registry[rank_route(0)] = {"rank_ip": host, "rank_port": int(port)}
        shown = [
            {"url": prefill_url, "role": "prefill", "state": "ready", "breaker": "closed"},
            {"url": decode_url, "role": "decode", "state": "ready", "breaker": "closed"},
        ]
        router["/server_info"] = {"role": "router", "registry": registry_url, "workers": shown}
        router["/v1/models"] = {"data": [{"id": "smollm2"}]}
        router["/v1/chat/completions"] = {"choices": [{"message": {"content": "Paris,\nof course."}}]}
        with serving(router) as router_url:
            urls = {"router": router_url, "prefill": prefill_url, "decode": decode_url, "registry": registry_url}
            yield FakeStack(router, registry, prefill, decode, urls)


def test_a_healthy_stack_is_found_healthy_with_a_real_answer(stack: FakeStack) -> None:
    code, said = stack.findings()
    assert stack.bad() == [] and code == 0 and said["healthy"] is True
    texts = [finding["text"] for section in said["sections"] for finding in section["findings"]]
    assert any("1 of 1 × 1 pairs fit each other" in text for text in texts)
    assert any("'Paris, of course.'" in text for text in texts)
    assert any("1 of 1 prefill workers complete" in text for text in texts), "the registry is the one the router names"


def test_a_mismatch_names_both_values_and_both_workers(stack: FakeStack) -> None:
    stack.decode["/server_info"]["fingerprint"] = fingerprint(PRINT | {"dtype": "float32", "weight_revision": "def"})
    (bad,) = stack.bad()
    assert bad["level"] == "fail" and bad["name"] == "pairs"
    assert "dtype is 'bfloat16' on prefill and 'float32' on decode" in bad["text"]
    assert "weight_revision is 'abc' on prefill and 'def' on decode" in bad["text"]
    assert stack.urls["prefill"] in bad["text"] and stack.urls["decode"] in bad["text"]
    assert stack.findings()[0] == 1


def test_many_pairs_with_the_same_mismatch_are_one_line() -> None:
    workers = [
        running.Worker(url=f"http://p{number}", role="prefill", info={"fingerprint": fingerprint({"layers": 1})})
        for number in range(3)
    ] + [
        running.Worker(
            url=f"http://d{number}", role="decode", info={"fingerprint": fingerprint({"layers": number % 2})}
        )
        for number in range(4)
    ]
    bad, good = running.judge_fit(workers)
    assert "http://p0 → http://d0 and 5 more pairs" in bad.text and "layers is 1 on prefill and 0 on decode" in bad.text
    assert "6 of 3 × 4 pairs fit" in good.text


def test_workers_that_do_not_say_are_left_to_their_handshake() -> None:
    workers = [
        running.Worker(url="http://p", role="prefill", info={"role": "prefill"}),
        running.Worker(url="http://d", role="decode", info={"fingerprint": "x"}),
    ]
    (finding,) = running.judge_fit(workers)
    assert finding.level is Level.OK and "1 workers do not say" in finding.text


def test_a_router_without_a_pair_gives_its_reason(stack: FakeStack) -> None:
    stack.router["/ready"] = (
        503,
        {"ready": False, "reasons": ["no decode worker is usable (http://d: not probed yet)"]},
    )
    bad = stack.bad("--no-completion")
    assert [one["name"] for one in bad] == ["router"] and "not probed yet" in bad[0]["text"]


def test_a_worker_that_is_away_unready_or_something_else_fails(stack: FakeStack) -> None:
    stack.decode["/ready"] = (503, {"ready": False, "reasons": ["the worker is draining"]})
    stack.prefill["/server_info"]["role"] = "decode"
    bad = {one["name"]: one["text"] for one in stack.bad("--worker", "http://127.0.0.1:1", "--no-completion")}
    assert "the worker is draining" in bad["decode"]
    assert "is a decode worker, and is listed as prefill" in bad["prefill"]
    assert "nothing listens there" in bad["worker"]


def test_a_prefill_worker_that_is_not_registered_cannot_be_looked_up(stack: FakeStack) -> None:
    stack.registry["/v1/instances"]["instances"] = []
    bad = {one["name"]: one for one in stack.bad()}
    assert bad["registry"]["level"] == "warn"
    assert bad["registration"]["level"] == "fail" and "cannot look it up" in bad["registration"]["text"]


def test_a_registry_that_remembers_a_former_life_is_told_apart(stack: FakeStack) -> None:
    stack.prefill["/server_info"]["incarnation"] = "next-life"
    (bad,) = stack.bad()
    assert "as life prefill-life, and it is next-life" in bad["text"]


def test_a_rank_that_is_missing_is_counted(stack: FakeStack) -> None:
    stack.registry["/v1/instances"]["instances"][0] |= {"ready": False, "ranks_total": 4}
    (bad,) = stack.bad()
    assert "1 of 4 ranks registered" in bad["text"]


def test_a_rank_that_cannot_be_reached_is_found_before_any_traffic(stack: FakeStack) -> None:
    stack.registry["/v1/instances"]["instances"][0]["layout"]["attn_tp_size"] = 3
    stack.registry[rank_route(1)] = {"rank_ip": "127.0.0.1", "rank_port": 1}
    (bad,) = stack.bad()
    assert bad["name"] == "links" and "2 of 3 prefill ranks" in bad["text"]
    assert (
        "tp 1 pp 0 at 127.0.0.1:1: Connection refused" in bad["text"]
        and "tp 2 pp 0: look-up answers 404" in bad["text"]
    )


def test_an_open_breaker_and_an_unfinished_upgrade_are_warnings(stack: FakeStack) -> None:
    stack.router["/server_info"]["workers"][1]["breaker"] = "open"
    stack.decode["/server_info"]["version"] = "0.2.0"
    bad = stack.bad()
    assert [one["level"] for one in bad] == ["warn", "warn"]
    assert stack.findings()[0] == 0 and stack.findings("--strict")[0] == 1


def test_a_router_with_keys_wants_one_from_a_file(stack: FakeStack, tmp_path: Path) -> None:
    stack.router["key"] = "sk-1"
    (bad,) = stack.bad()
    assert "wants an API key" in bad["text"] and "--key-file" in bad["advice"]
    (tmp_path / "key").write_text("sk-1\n")
    assert stack.bad("--key-file", str(tmp_path / "key")) == []


def test_a_completion_that_fails_shows_the_router_s_own_words(stack: FakeStack) -> None:
    stack.router["/v1/chat/completions"] = (504, {"error": {"message": "deadline: waiting for pages"}})
    (bad,) = stack.bad()
    assert "504" in bad["text"] and "waiting for pages" in bad["text"]


def test_what_is_no_router_is_called_what_it_is(stack: FakeStack) -> None:
    out = StringIO()
    assert doctor(options("--url", stack.urls["decode"], "--json"), {}, Screen(out)) == 1
    assert "is no router of ours but decode" in out.getvalue()


def test_nobody_there_fails_with_what_to_type() -> None:
    out = StringIO()
    assert doctor(options("--url", "127.0.0.1:1", "--registry", "127.0.0.1:1"), {}, Screen(out)) == 1
    text = out.getvalue()
    assert text.count("nothing listens there") == 2 and "→ is it started" in text
    assert text.splitlines()[-1].endswith("2 failures")


def test_a_clock_that_is_off_is_a_warning() -> None:
    ahead = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    reply = Reply(status=200, headers={"date": ahead}, body=b"", seconds=0.01)
    (finding,) = running.skew_findings("http://d", running.skew_s(reply))
    assert finding.level is Level.WARN and "ahead of" in finding.text
    assert running.skew_findings("http://d", 1.0) == []


def test_an_empty_or_unreadable_key_file_is_a_wrong_call(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for path in (tmp_path / "empty", tmp_path / "none"):
        with pytest.raises(UsageError, match="--key-file"):
            read_key(path)


def test_what_cannot_be_reached_says_why() -> None:
    with pytest.raises(Unreachable, match="connection refused"):
        fetch("http://127.0.0.1:1/", timeout_seconds=1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unreachable, match=r"within 0\.05 s"):
        fetch(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout_seconds=0.05)
