"""`baton top`: Prometheus' text read, two scrapes compared, frames drawn, and the command against real HTTP."""

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from baton_cli.__main__ import build_parser
from baton_cli.errors import CliError, UsageError
from baton_cli.interrupt import Interrupt
from baton_cli.show import Screen
from baton_cli.top.collect import Collector
from baton_cli.top.command import top
from baton_cli.top.frame import Line, flow, number, render, seconds, sparks, times
from baton_cli.top.series import Histogram, Window, histogram, parse
from baton_cli.top.view import Known, Row, Times, View, counts_by_reason, router_figures, rows_of, stages_of, view_of
from unit.canned_http import Answers, serving

SCRAPES = Path(__file__).resolve().parents[1] / "deploy/scrape"
PREFILL, DECODE = "http://10.0.0.1:8100", "http://10.0.0.2:8200"


def scraped(role: str) -> str:
    """What a real process exported once."""
    return (SCRAPES / f"{role}.prom").read_text()


def window(text: str, before: str | None = None, seconds_between: float = 10.0) -> Window:
    return Window(parse(text, 100.0), None if before is None else parse(before, 100.0 - seconds_between))


# -- the text format


def test_samples_are_read_with_labels_escapes_and_timestamps() -> None:
    found = parse('# HELP a b\na 1\nb{x="1",y="q\\"u\\\\o\\n"} 2.5e3 1700000\nrubbish line\nc NaNny\n', 0.0)
    assert found.samples == {
        "a": (({}, 1.0),),
        "b": (({"x": "1", "y": 'q"u\\o\n'}, 2500.0),),
    }


def test_every_line_that_real_processes_export_is_understood() -> None:
    for path in SCRAPES.glob("*.prom"):
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert sum(map(len, parse(path.read_text(), 0.0).samples.values())) == len(lines) > 5


def test_series_are_chosen_by_their_labels() -> None:
    found = parse('q{queue="a",dp_rank="0"} 1\nq{queue="a",dp_rank="1"} 2\nplain 7\n', 0.0)
    assert found.total("q", dp_rank="1") == 2
    assert found.total("plain") == 7 and found.total("plain", dp_rank="1") is None
    assert found.total("absent") is None
    assert found.by("q", "queue") == {"a": 3.0}


BUCKETS = 't_bucket{le="0.1"} 50\nt_bucket{le="0.2"} 90\nt_bucket{le="+Inf"} 100\n'


def test_quantiles_are_those_of_prometheus() -> None:
    found = histogram(parse(BUCKETS, 0.0), "t")
    assert found.quantile(0.25) == pytest.approx(0.05)
    assert found.quantile(0.7) == pytest.approx(0.15)
    assert found.quantile(0.99) == 0.2, "beyond the last bound nothing is known"
    assert Histogram().quantile(0.5) is None


def test_a_window_holds_what_came_between_two_scrapes() -> None:
    later = BUCKETS.replace("50", "60").replace("90", "110").replace("100", "120") + "n_total 30\n"
    found = window(later, BUCKETS + "n_total 10\n")
    assert found.rate("n_total") == 2.0
    assert found.histogram("t").counts == (10.0, 20.0, 20.0)


def test_a_process_that_was_restarted_counts_from_zero() -> None:
    found = window("n_total 4\n" + BUCKETS.replace("50", "1"), "n_total 10\n" + BUCKETS)
    assert found.increase("n_total") == 4.0
    assert found.histogram("t").count == 100.0


def test_without_an_earlier_scrape_there_are_totals_and_no_rates() -> None:
    found = window("n_total 4\n")
    assert (found.increase("n_total"), found.rate("n_total")) == (4.0, None)


# -- rows and stages


def known(role: str, text: str, before: str | None = None, **more: Any) -> Known:
    url = PREFILL if role == "prefill" else DECODE
    return Known(url=url, role=role, window=window(text, before), **more)


def test_a_real_decode_worker_becomes_a_row() -> None:
    (row,) = rows_of(known("decode", scraped("decode")))
    assert (row.role, row.name, row.rank, row.state) == ("decode", "10.0.0.2:8200", "", "ready")
    assert (row.running, row.waiting, row.pages, row.pages_free) == (0, 0, 2048, 2048)
    assert row.polls == (0, 0, 0, 0, 0)
    assert row.ttft.p50 is not None and row.between["step_seconds"].p99 is not None and row.tick_p99_s is not None
    assert row.tokens_per_s is None and row.rejected == 1


def ranked(tokens: tuple[int, int]) -> str:
    lines = ["baton_decode_ready 1", 'baton_decode_admission_rejections_total{reason="waiting_full"} 3']
    for rank, count in enumerate(tokens):
        lines += [
            f'baton_decode_queue_requests{{queue="running",dp_rank="{rank}"}} {rank + 1}',
            f'baton_decode_queue_requests{{queue="prealloc",dp_rank="{rank}"}} {2 * rank}',
            f'baton_decode_step_tokens_total{{dp_rank="{rank}"}} {count}',
            f'baton_decode_pages{{dp_rank="{rank}"}} 100',
            f'baton_decode_pages_free{{dp_rank="{rank}"}} {50 - rank}',
        ]
    return "\n".join(lines) + "\n"


def test_each_dp_rank_has_a_row_of_its_own_below_the_sum_of_all() -> None:
    whole, first, second = rows_of(known("decode", ranked((300, 500)), ranked((100, 100))))
    assert (whole.rank, whole.running, whole.waiting, whole.tokens_per_s, whole.pages_free) == ("", 3, 2, 60.0, 99)
    assert whole.rejected == 0 and first.rejected is None, "what is counted for all ranks together is no rank's"
    assert (first.rank, first.running, first.tokens_per_s, first.pages_free) == ("0", 1, 20.0, 50)
    assert (second.rank, second.waiting, second.tokens_per_s, second.pages_free) == ("1", 2, 40.0, 49)


def test_a_worker_that_does_not_answer_says_so() -> None:
    (row,) = rows_of(Known(url=DECODE, role="decode", state="ready", breaker="open"))
    assert (row.state, row.breaker, row.running) == ("no answer", "open", None)


def test_of_what_tells_how_fast_tokens_follow_each_other_the_best_is_shown() -> None:
    steps = BUCKETS.replace("t_", "baton_decode_step_seconds_")
    means = steps.replace("step_seconds", "tpot_seconds").replace("0.1", "0.01").replace("0.2", "0.02")
    assert [frame(text).between for text in (steps, steps + means)] == ["step_seconds", "tpot_seconds"]
    head, *_ = (one for one in text_of(frame(steps + means), width=200) if one.startswith("WORKER"))
    assert "TPOT 50/99" in head and "STEP" not in head
    (row,) = rows_of(known("decode", steps + means))
    assert (row.between["step_seconds"].p99, row.between["tpot_seconds"].p99) == (0.2, 0.02)


def test_stages_stand_in_the_order_of_a_request_s_way_and_only_those_somebody_was_in() -> None:
    found = stages_of([known("prefill", scraped("prefill")), known("decode", scraped("decode"))])
    names = [(one.role, one.name) for one in found]
    assert names[:2] == [("prefill", "bootstrapping"), ("prefill", "accepted")]
    assert ("decode", "transferring") in names and ("decode", "intake") not in names
    assert all(one.times.p50 is not None and one.per_s is None for one in found)


def test_reasons_are_those_of_the_window_most_first() -> None:
    text = 'baton_decode_failures_total{reason="peer_lost"} %d\nbaton_decode_failures_total{reason="deadline"} %d\n'
    workers = [known("decode", text % (7, 9), text % (2, 9)), known("prefill", "")]
    assert counts_by_reason(workers, None, "failures") == {"decode peer_lost": 5.0}


# -- frames


def frame(decode: str = "", *, faults: bool = True, before: str | None = None, copies: int = 1) -> View:
    workers = [known("prefill", scraped("prefill"), state="ready")]
    workers += [known("decode", decode or scraped("decode"), before, state="ready")] * copies
    router = window(scraped("router")) if faults else None
    info = {"workers": [{"role": "prefill", "state": "ready"}, {"role": "decode", "state": "ready"}]}
    return view_of(
        clock="12:00:00",
        router=router_figures("http://127.0.0.1:8000", router, "" if router else "nothing listens there", info),
        router_window=router,
        workers=workers,
        history=(1.0, 4.0, 8.0),
    )


def text_of(view: View, width: int = 120, height: int | None = None) -> list[str]:
    lines = render(view, width=width, height=height, every_s=None)
    return [line.painted(lambda text, _colour: text) for line in lines]


def test_a_wide_frame_shows_everything() -> None:
    text = "\n".join(text_of(frame(), width=160))
    for word in (
        "baton top",
        "router",
        "prefill 10.0.0.1:8100",
        "decode  10.0.0.2:8200",
        "TTFT 50/99",
        "TICK 99",
        "PAGES",
    ):
        assert word in text
    assert "refused" in text and "decode invalid_request 1" in text and "▁▅█"[-1] in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_no_line_is_longer_than_the_terminal(width: int) -> None:
    assert max(map(len, text_of(frame(), width=width))) <= width


def test_a_narrow_frame_keeps_the_columns_that_matter_most() -> None:
    head = next(line for line in text_of(frame(), width=60) if line.startswith("WORKER"))
    assert "STATE" in head and "RUN" in head and "WAIT" in head and "PAGES" not in head


def test_the_stages_of_both_roles_stand_side_by_side_where_there_is_room() -> None:
    def beside(width: int) -> bool:
        return any("prefill stage" in line and "decode stage" in line for line in text_of(frame(), width=width))

    assert beside(120) and not beside(80)


@pytest.mark.parametrize("height", [3, 8, 12, 20, 60])
def test_no_frame_is_higher_than_the_terminal(height: int) -> None:
    shown = text_of(frame(copies=30), height=height)
    assert len(shown) <= height and shown[0].startswith("baton top")


def test_a_low_terminal_shows_workers_rather_than_all_that_the_router_says() -> None:
    shown = text_of(frame(), width=50, height=8)
    assert [line.split()[0] for line in shown if line] == ["baton", "router", "decode", "WORKER", "prefill", "decode"]


def test_workers_that_do_not_fit_are_counted() -> None:
    shown = text_of(frame(copies=30), height=12)
    assert shown[-1].startswith("… ") and shown[-1].endswith(" more")


def test_a_router_that_is_away_is_said_and_the_workers_are_shown_all_the_same() -> None:
    shown = text_of(frame(faults=False))
    assert "nothing listens there" in shown[1] and any("decode" in line for line in shown[2:])


def test_ranks_are_indented_under_their_worker() -> None:
    shown = text_of(frame(ranked((300, 500)), before=ranked((100, 100))))
    start = next(place for place, line in enumerate(shown) if line.startswith("decode  10.0.0.2"))
    assert shown[start + 1].startswith("  rank 0 ") and shown[start + 2].startswith("  rank 1 ")


def test_figures_are_short_and_carry_their_unit() -> None:
    assert [seconds(value) for value in (None, 0.0004, 0.0123, 0.94, 1.26, 120)] == [
        "–", "0.4ms", "12ms", "940ms", "1.3s", "120s",
    ]  # fmt: skip
    assert [number(value) for value in (None, 0, 0.26, 3, 12.4, 1234, 250_000)] == [
        "–", "0", "0.3", "3", "12", "1,234", "250k",
    ]  # fmt: skip
    assert times(Times(p50=0.012, p99=0.25)) == "12/250ms"
    assert times(Times(p50=0.012, p99=1.25)) == "12ms/1.2s"
    assert times(Times()) == "–"
    assert sparks((0.0, 4.0, 8.0)) == "▁▅█" and sparks((0.0,)) == ""


def test_a_cut_line_shows_that_it_was_cut() -> None:
    cut = Line((("abcdef", ""), ("ghi", ""))).cut(5)
    assert "".join(text for text, _ in cut.pieces) == "abcd…" and cut.length == 5


def test_items_that_do_not_fit_beside_each_other_go_below() -> None:
    lines = flow("router", [("one", ""), ("two", ""), ("three", "")], 20)
    assert ["".join(text for text, _ in one.pieces) for one in lines] == ["router     one  two", "           three"]


# -- the command


@pytest.fixture
def stack() -> Iterator[tuple[Answers, str]]:
    """A router and two workers that answer what real ones answered."""
    router: Answers = {}
    with serving({"/metrics": scraped("prefill")}) as prefill, serving({"/metrics": scraped("decode")}) as decode:
        workers = [
            {"url": prefill, "role": "prefill", "state": "ready", "breaker": "closed"},
            {"url": decode, "role": "decode", "state": "draining", "breaker": "half_open"},
        ]
        router |= {"/server_info": {"role": "router", "workers": workers}, "/metrics": scraped("router")}
        with serving(router) as url:
            yield router, url


def options(*argv: str) -> Namespace:
    return build_parser().parse_args(["top", *argv])


def test_once_prints_one_frame_without_colours(stack: tuple[Answers, str]) -> None:
    out = StringIO()
    assert top(options("--once", "--url", stack[1]), Screen(out), Interrupt()) == 0
    shown = out.getvalue()
    assert "\x1b" not in shown and "since each process started" in shown
    assert "draining half open" in shown and "1 prefill and 0 decode workers usable" in shown


def test_once_without_a_router_shows_the_workers_that_were_named_and_fails(stack: tuple[Answers, str]) -> None:
    out = StringIO()
    with serving({"/server_info": {"role": "decode"}, "/metrics": scraped("decode")}) as worker:
        found = top(options("--once", "--url", "127.0.0.1:1", "--worker", worker), Screen(out), Interrupt())
    assert found == 1
    assert "nothing listens there" in out.getvalue() and "decode  127.0.0.1" in out.getvalue()


def test_a_worker_asked_for_as_if_it_were_the_router_is_named_as_what_it_is() -> None:
    out = StringIO()
    with serving({"/server_info": {"role": "decode"}}) as worker:
        assert top(options("--once", "--url", worker), Screen(out), Interrupt()) == 1
    assert "no router of ours" in out.getvalue() and "'decode'" in out.getvalue()


def test_without_anything_to_watch_it_says_what_to_do() -> None:
    with pytest.raises(CliError, match="baton up"):
        top(options("--url", "http://127.0.0.1:1"), Screen(StringIO()), Interrupt())


def test_a_router_that_goes_away_leaves_its_workers_in_view_with_their_own_words() -> None:
    with serving({"/metrics": scraped("decode")}) as decode:
        workers = [{"url": decode, "role": "decode", "state": "draining", "breaker": "open"}]
        with serving({"/server_info": {"role": "router", "workers": workers}, "/metrics": scraped("router")}) as url:
            collector = Collector(url, [], window_s=30, timeout_s=2)
            (before,) = collector.look().rows
        view = collector.look()
    assert (before.state, before.breaker) == ("draining", "open")
    assert view.router.fault and [(row.state, row.breaker) for row in view.rows] == [("ready", "closed")]
    assert view.seconds > 0


class _After(Interrupt):
    """Ctrl-C comes while the third frame stands; nothing waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        return self.waits == 3


def test_into_a_pipe_frames_follow_each_other(stack: tuple[Answers, str]) -> None:
    out = StringIO()
    assert top(options("--url", stack[1]), Screen(out), _After()) == 0
    assert out.getvalue().count("baton top") == 3


@pytest.mark.parametrize(
    "argv", [["--interval", "0"], ["--columns", "3"], ["--window-seconds", "0"], ["--url", "ftp://x"], ["--url", ""]]
)
def test_settings_without_sense_are_refused(argv: list[str]) -> None:
    with pytest.raises(UsageError):
        top(options(*argv), Screen(StringIO()), Interrupt())


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *argv: str) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "baton_cli", "top", *argv])
        self.seen = ""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        os.kill(self.pid, signal.SIGWINCH)

    def until(self, text: str) -> None:
        """Read until that was painted."""
        self._read_until(lambda: text in self.seen, text)

    def until_frame(self, holds: Callable[[str], bool]) -> None:
        """Read until a whole frame is like that."""
        self._read_until(lambda: any(map(holds, self.seen.split("\x1b[H")[1:-1])), "such a frame")

    def _read_until(self, holds: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + 20
        while not holds():
            ready, _, _ = select.select([self.descriptor], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, f"{what!r} does not come; so far: {self.seen[-2_000:]!r}"
            self.seen += os.read(self.descriptor, 65_536).decode("utf-8", "replace")

    def type(self, keys: str) -> None:
        os.write(self.descriptor, keys.encode())

    def close(self) -> None:
        """Whatever happened: nothing is left behind."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.descriptor)

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_in_a_terminal_it_repaints_follows_the_size_and_leaves_the_screen_as_it_was(stack: tuple[Answers, str]) -> None:
    terminal = Terminal("--url", stack[1], "--interval", "0.2")
    try:
        terminal.resize(150, 40)
        terminal.until("PAGES")
        assert terminal.seen.startswith("\x1b[?1049h")
        terminal.until("last 1 s")  # a later frame: rates are there
        terminal.resize(50, 8)
        terminal.until_frame(lambda shown: "WORKER" in shown and "PAGES" not in shown and shown.count("\n") <= 7)
        terminal.type("x q")
        terminal.until("\x1b[?1049l")
        assert terminal.exit_code() == 0
    finally:
        terminal.close()


def test_rows_without_figures_are_dashes_not_zeros() -> None:
    empty = View(
        clock="",
        seconds=0.0,
        router=router_figures("http://r", None, "away", {}),
        rows=(Row(role="decode", name="d"),),
        stages=(),
        rejections={},
        failures={},
    )
    row = text_of(empty)[-1]
    assert row.startswith("decode  d") and set(row.split()[2:]) == {"–"}
