"""One frame as lines of text: what fits into the width and height there are, the most important first. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton_cli.show import BOLD, DIM, GREEN, PLAIN, RED, YELLOW
from baton_cli.top.view import BETWEEN_TOKENS, POLLS, Row, Stage, Times, View

DASH = "–"
GAP = 2
LABEL = 11
HEAD_LINES_LEAST = 3
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_CELLS = 24
SLOW_TICK_S = 0.02
LOW_PAGES_SHARE = 0.1
STATE_COLOURS = {"ready": GREEN, "draining": YELLOW, "unready": RED, "no answer": RED}
TWO_COLUMNS = 96
"""From this width on prefill's and decode's stages stand side by side."""

Paint = Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class Line:
    """Pieces of text with a colour each; cut by the characters that are seen."""

    pieces: tuple[tuple[str, str], ...] = ()

    @property
    def length(self) -> int:
        """Characters that are seen."""
        return sum(len(text) for text, _ in self.pieces)

    def plus(self, text: str, colour: str = PLAIN) -> "Line":
        """With one more piece."""
        return Line((*self.pieces, (text, colour)))

    def beside(self, other: "Line", column: int) -> "Line":
        """Both on one line, the other from `column` on."""
        return Line((*self.cut(column).pieces, (" " * max(0, column - self.length), PLAIN), *other.pieces))

    def cut(self, columns: int) -> "Line":
        """No longer than that; what was cut shows."""
        if self.length <= columns:
            return self
        left, kept = max(0, columns - 1), []
        for text, colour in self.pieces:
            kept.append((text[:left], colour))
            left -= len(text[:left])
        return Line((*kept, ("…", DIM))) if columns > 0 else Line()

    def painted(self, paint: Paint) -> str:
        """As a terminal takes it."""
        return "".join(paint(text, colour) for text, colour in self.pieces if text)


def line(text: str = "", colour: str = PLAIN) -> Line:
    """Of one piece."""
    return Line(((text, colour),))


# -- figures as text


def seconds(value: float | None) -> str:
    """Short, with its unit: 12ms, 1.2s."""
    if value is None:
        return DASH
    if value < 0.0095:
        return f"{value * 1000:.1f}ms"
    if value < 0.9995:
        return f"{value * 1000:.0f}ms"
    return f"{value:.1f}s" if value < 99.95 else f"{value:.0f}s"


def times(found: Times) -> str:
    """p50/p99; the unit stands once where it is the same."""
    first, second = seconds(found.p50), seconds(found.p99)
    if first == second == DASH:
        return DASH
    unit = second.lstrip("0123456789.")
    same = unit and first.lstrip("0123456789.") == unit
    return f"{first.removesuffix(unit) if same else first}/{second}"


def number(value: float | None) -> str:
    """A count or a rate, short."""
    if value is None:
        return DASH
    if value >= 99_950:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if value >= 9.95 or value == int(value) else f"{value:.1f}"


def percent(share: float | None) -> str:
    """Of one."""
    return DASH if share is None else f"{share:.0%}"


def sparks(values: Sequence[float]) -> str:
    """The last values as little bars; nothing for nothing."""
    shown = list(values)[-SPARK_CELLS:]
    top = max(shown, default=0.0)
    if top <= 0:
        return ""
    return "".join(SPARKS[min(len(SPARKS) - 1, int(len(SPARKS) * value / top))] for value in shown)


# -- columns of the table of workers


@dataclass(frozen=True, slots=True)
class Column:
    """`rank`: the smaller, the longer it stays when the terminal is narrow."""

    head: str
    rank: int
    cell: Callable[[Row], tuple[str, str]]
    to_left: bool = False


def columns_of(view: View) -> tuple[Column, ...]:
    """In the order they are shown."""
    gaps = BETWEEN_TOKENS[view.between]
    return (
        Column("WORKER", 0, _name, to_left=True),
        Column("STATE", 1, _state, to_left=True),
        Column("RUN", 2, lambda row: (number(row.running), PLAIN)),
        Column("WAIT", 3, lambda row: (number(row.waiting), YELLOW if row.waiting else PLAIN)),
        Column("TOK/S", 4, lambda row: (number(row.tokens_per_s), PLAIN)),
        Column("FREE", 5, _free),
        Column("TTFT 50/99", 6, lambda row: (times(row.ttft), PLAIN)),
        Column(f"{gaps} 50/99", 7, lambda row: (times(row.between.get(view.between, Times())), PLAIN)),
        Column("TICK 99", 8, lambda row: (seconds(row.tick_p99_s), _late(row.tick_p99_s))),
        Column("HIT", 10, lambda row: (percent(row.hit_share), PLAIN)),
        Column("REJ", 9, lambda row: (number(row.rejected), YELLOW if row.rejected else PLAIN)),
        Column("/".join(poll[0] for poll in POLLS), 11, _polls),
        Column("PAGES", 12, _pages),
    )


def _name(row: Row) -> tuple[str, str]:
    return (f"  rank {row.rank}", DIM) if row.rank else (f"{row.role:<7} {row.name}", PLAIN)


def _state(row: Row) -> tuple[str, str]:
    if row.rank:
        return "", PLAIN
    if row.breaker != "closed":
        return f"{row.state} {row.breaker.replace('_', ' ')}", RED
    return row.state or DASH, STATE_COLOURS.get(row.state, PLAIN)


def _share_free(row: Row) -> float | None:
    return row.pages_free / row.pages if row.pages and row.pages_free is not None else None


def _free(row: Row) -> tuple[str, str]:
    share = _share_free(row)
    if row.quarantined:
        return f"{percent(share)} q{row.quarantined}", RED
    return percent(share), YELLOW if share is not None and share < LOW_PAGES_SHARE else PLAIN


def _pages(row: Row) -> tuple[str, str]:
    return (DASH if row.pages is None else f"{number(row.pages_free)}/{number(row.pages)}"), PLAIN


def _polls(row: Row) -> tuple[str, str]:
    return "/".join(map(str, row.polls)) or DASH, RED if row.polls and row.polls[-1] else PLAIN


def _late(lag_s: float | None) -> str:
    return YELLOW if lag_s is not None and lag_s > SLOW_TICK_S else PLAIN


def table(view: View, width: int) -> list[Line]:
    """The workers, with as many columns as fit."""
    columns = columns_of(view)
    cells = [[column.cell(row) for column in columns] for row in view.rows]
    widths = [max([len(column.head), *(len(row[place][0]) for row in cells)]) for place, column in enumerate(columns)]
    kept: set[int] = set()
    used = -GAP
    for place in sorted(range(len(columns)), key=lambda one: columns[one].rank):
        if used + GAP + widths[place] > width and kept:
            continue
        kept.add(place)
        used += GAP + widths[place]
    places = sorted(kept)
    head = [(columns[place].head, BOLD) for place in places]
    return [
        _aligned(row, [widths[place] for place in places], [columns[place].to_left for place in places])
        for row in [head, *([row[place] for place in places] for row in cells)]
    ]


def _aligned(cells: Iterable[tuple[str, str]], widths: Sequence[int], to_left: Sequence[bool]) -> Line:
    made = Line()
    for place, (text, colour) in enumerate(cells):
        padded = text.ljust(widths[place]) if to_left[place] else text.rjust(widths[place])
        made = made.plus((" " * GAP if place else "") + padded, colour)
    return made


# -- the other parts


def head_of(view: View, width: int, every_s: float | None) -> list[Line]:
    """Who is looked at, when, and what the router says."""
    span = f"last {view.seconds:.0f} s" if view.seconds else "since each process started"
    live = [] if every_s is None else [(f"every {every_s:g} s", DIM), ("q quits, space freezes", DIM)]
    router = view.router
    title = flow("baton top", [(router.url, PLAIN), (view.clock, PLAIN), (span, DIM), *live], width)
    if router.fault:
        return [*title, *flow("router", [(router.fault, RED)], width)]
    counts = [
        (f"{number(count)} {word}", RED if count else PLAIN)
        for count, word in (
            (router.open_breakers, "breakers open"),
            (router.retries, "retried"),
            (router.errors, "answered 5xx"),
            (router.broken, "streams broken"),
        )
        if count is not None
    ]
    said = [
        (f"{number(router.requests_per_s)} req/s", PLAIN),
        (f"{number(router.under_way)} under way", PLAIN),
        (f"{number(router.queued)} queued", YELLOW if router.queued else PLAIN),
        (f"TTFT {times(router.ttft)}", PLAIN),
        (f"ITL {times(router.itl)}", PLAIN),
        (f"whole {times(router.whole)}", PLAIN),
        (router.usable, PLAIN),
        *counts,
    ]
    lines = [*title, *flow("router", said, width)]
    if view.history and max(view.history) > 0:
        speed = [(f"{number(view.history[-1])} tok/s", PLAIN), (sparks(view.history), GREEN)]
        lines += flow("decode", speed, width)
    return lines


def flow(label: str, items: Sequence[tuple[str, str]], width: int) -> list[Line]:
    """A label and items beside it, on as many lines as they take."""
    made = [line(f"{label:<{LABEL}}", BOLD)]
    for text, colour in items:
        gap = "" if made[-1].length == LABEL else " " * GAP
        if gap and made[-1].length + len(gap) + len(text) > width:
            made.append(line(" " * LABEL))
            gap = ""
        made[-1] = made[-1].plus(gap).plus(text, colour)
    return made


def stages(view: View, width: int) -> list[Line]:
    """How long requests stay in each stage, and how many are there now."""
    if not view.stages:
        return []
    blocks = [
        _stage_block(role, [one for one in view.stages if one.role == role])
        for role in dict.fromkeys(one.role for one in view.stages)
    ]
    if len(blocks) == 1 or width < TWO_COLUMNS:
        return [made for block in blocks for made in block]
    left, right = blocks[0], blocks[1]
    height = max(len(left), len(right))
    left, right = (block + [Line()] * (height - len(block)) for block in (left, right))
    return [one.beside(other, width // 2) for one, other in zip(left, right, strict=True)]


def _stage_block(role: str, several: Sequence[Stage]) -> list[Line]:
    rows = [("NOW", "/S", "P50", "P99")]
    rows += [(number(one.now), number(one.per_s), seconds(one.times.p50), seconds(one.times.p99)) for one in several]
    names = [f"{role} stage", *(one.name for one in several)]
    widths = [max(len(row[place]) for row in rows) for place in range(4)]
    made = []
    for place, (name, row) in enumerate(zip(names, rows, strict=True)):
        text = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        made.append(line(f"{name:<16}", BOLD if not place else PLAIN).plus(text, BOLD if not place else PLAIN))
    return made


def reasons(view: View, width: int) -> list[Line]:
    """What was refused and what failed."""
    made: list[Line] = []
    for title, counts in (("refused", view.rejections), ("failed", view.failures)):
        if counts:
            made += flow(title, [(f"{key} {number(count)}", YELLOW) for key, count in counts.items()], width)
    return made


def render(view: View, *, width: int, height: int | None, every_s: float | None) -> list[Line]:
    """The frame: the head, the workers, the stages, the reasons; cut to `width`, and to `height` where there is one."""
    head, workers = head_of(view, width, every_s), table(view, width)
    parts = [head, [Line(), *workers]]
    if not view.rows:
        parts[1] = [Line(), line("no worker is known", YELLOW)]
    for part in (stages(view, width), reasons(view, width)):
        if part:
            parts.append([Line(), *part])
    if height is not None:
        parts[0] = _shortened(head, max(HEAD_LINES_LEAST, height // 3))
        parts = _fitting(parts, height)
    return [one.cut(width) for part in parts for one in part]


def _shortened(head: list[Line], height: int) -> list[Line]:
    """The first line of each label before what continues it."""
    places = sorted(range(len(head)), key=lambda place: (not head[place].pieces[0][0].strip(), place))
    return [head[place] for place in sorted(places[:height])]


def _fitting(parts: list[list[Line]], height: int) -> list[list[Line]]:
    """Whole parts from the top; the workers are cut where even they do not fit, the others are left out whole."""
    left, kept = height, []
    for place, part in enumerate(parts):
        if len(part) <= left:
            kept.append(part)
            left -= len(part)
        elif place < 2 and left > 0:
            hidden = len(part) - left + 1
            kept.append([*part[: left - 1], line(f"… {hidden} more", DIM)])
            left = 0
    return kept
