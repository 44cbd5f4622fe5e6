"""``kvcore inspect``: a snapshot in the terminal, and as a page."""

from __future__ import annotations

import importlib.resources
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore import ConfigError, KVCacheManager
from kvcore.cli import main
from kvcore.inspect_terminal import printable, render
from kvcore.snapshot import Snapshot, save_snapshots
from kvcore.snapshot_html import snapshots_to_html
from kvcore.testing import admit, make_manager, make_request

pytest.importorskip("rich", reason="rich is not installed")


def busy_manager() -> KVCacheManager:
    """Three requests with a common prompt, one of them finished; 12 of 30 blocks held."""
    manager = make_manager(31, groups=["full", "sliding:6"], max_model_len=200)
    requests = [
        make_request(name, [*range(16), *range(at, at + 5)], manager)
        for name, at in zip("abc", (50, 60, 70), strict=True)
    ]
    for request in requests:
        admit(manager, request)
    manager.free(requests[2])
    return manager


def rows_after(text: str, title: str) -> list[list[str]]:
    """The cells of the table under a title."""
    lines = text[text.index(title) :].splitlines()[1:]
    rule = next(number for number, line in enumerate(lines) if "───" in line)
    rows = []
    for line in lines[rule + 1 :]:
        if not line.strip():
            break
        rows.append(re.split(r"\s{2,}", line.strip()))
    return rows


def test_the_terminal_shows_usage_queue_shared_prefixes_and_who_holds_what() -> None:
    manager = busy_manager()
    snapshot = manager.snapshot("after c")
    text = render(snapshot, width=140, num_rows=3)
    held = 30 - len(snapshot.queue)
    assert text.startswith(f"after c\n{held} of 30 blocks in use ({snapshot.usage:.1%})")
    assert "group 1: window of 6, 4 tokens a block" in text
    counts = [int(row[0]) for row in rows_after(text, "Blocks")]
    assert counts == [snapshot.counts[state] for state in ("shared", "used", "cached", "empty")]
    head = rows_after(text, "Free queue, overwritten next")
    assert [(int(place), int(block)) for place, block, *_ in head] == [*enumerate(snapshot.queue[:3], 1)]
    tail = rows_after(text, "Free queue, overwritten last")
    assert [int(block) for _, block, *_ in tail] == list(snapshot.queue[-3:])
    first_shared = rows_after(text, "Longest shared prefixes")[0]
    longest = snapshot.shared_prefixes()[0]
    assert first_shared[:3] == [str(longest.num_tokens), "2", str(longest.group_id)]
    assert first_shared[-1] == "a, b"
    holders = rows_after(text, "Who holds most")
    assert holders[0][0] == "a"
    assert holders[0][3:6] == ["0", "6", "4"]
    assert len(holders) == 4  # two requests, two groups each


def test_a_short_queue_is_shown_once_and_an_empty_one_is_named() -> None:
    manager = make_manager(6)
    assert "overwritten last" not in render(manager.snapshot(), width=100)
    admit(manager, make_request("a", range(20), manager))
    text = render(manager.snapshot(), width=100)
    assert "No block is free." in text
    assert "No two requests share a block." in text


def test_an_empty_pool_says_that_nobody_holds_anything() -> None:
    text = render(make_manager(6, enable_caching=False).snapshot(), width=100)
    assert "No request holds blocks." in text
    assert "prefix caching is off" in text


def test_long_lists_are_cut_and_say_by_how_much() -> None:
    manager = make_manager(200)
    for number in range(12):
        admit(manager, make_request(f"r{number}", [*range(8), number], manager))
    text = render(manager.snapshot(), width=160, num_rows=5)
    assert "Who holds most (5 of 12)" in text
    assert "... 6 more" in text


def test_what_a_request_is_called_cannot_move_the_cursor_or_style_the_text() -> None:
    manager = make_manager(10)
    admit(manager, make_request("\x1b[2J[bold red]a[/] \r\u202e", range(5), manager))
    text = render(manager.snapshot("\x1b]0;title\x07"), width=120)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert r"\x1b[2J[bold red]a[/] \r\u202e" in text
    assert printable("plain names, ünïcode 漢字") == "plain names, ünïcode 漢字"


def test_colours_are_for_terminals_only() -> None:
    snapshot = busy_manager().snapshot()
    assert "\x1b[" in render(snapshot, width=100, colour=True)
    assert "\x1b[" not in render(snapshot, width=100)


# On the command line


@pytest.fixture
def snapshots(tmp_path: Path) -> str:
    manager = busy_manager()
    steps = [make_manager(31, groups=["full", "sliding:6"]).snapshot("start"), manager.snapshot("end")]
    save_snapshots(tmp_path / "pool.jsonl", steps)
    return str(tmp_path / "pool.jsonl")


def test_the_command_shows_the_last_snapshot_or_the_one_that_is_asked_for(
    snapshots: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", snapshots]) == 0
    assert capsys.readouterr().out.startswith("end\n")
    assert main(["inspect", snapshots, "--step", "1", "--rows", "2"]) == 0
    assert capsys.readouterr().out.startswith("start\n0 of 30 blocks in use")
    assert main(["inspect", snapshots, "--step", "3"]) == 2
    assert "beyond the last of the file's 2 snapshots" in capsys.readouterr().err


def test_the_command_writes_all_of_them_as_a_page(
    snapshots: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", snapshots, "--html", str(tmp_path / "pool.html")]) == 0
    assert "2 steps" in capsys.readouterr().out
    assert "<title>KV cache: pool.jsonl</title>" in (tmp_path / "pool.html").read_text()
    assert main(["inspect", snapshots, "--html", str(tmp_path / "nowhere" / "pool.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_without_rich_the_command_says_what_to_install(snapshots: str) -> None:
    program = "import sys; sys.modules['rich'] = sys.modules['rich.console'] = None\nfrom kvcore.cli import main\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}sys.exit(main(['inspect', {snapshots!r}]))"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "pip install 'kvcore[inspect]'" in done.stderr


# The page as a file


def test_the_page_is_one_file_that_names_no_other(tmp_path: Path) -> None:
    page = busy_manager().snapshot().to_html()
    assert not re.findall(r"""(?:src|href|url)\s*[=(]""", page)
    assert "http://" not in page
    assert "https://" not in page
    assert re.search(r"""content="default-src 'none'; style-src 'sha256-[^']+'; script-src 'sha256-[^']+';""", page)


def test_a_request_id_cannot_end_the_script_that_holds_the_data() -> None:
    manager = make_manager(10)
    admit(manager, make_request("</script><!--<script>{script}", range(5), manager))
    page = manager.snapshot("{style}").to_html(title="<b>{data}</b>")
    assert page.count("</script>") == 2
    assert "<!--<script>" not in page
    assert "<title>&lt;b&gt;{data}&lt;/b&gt;</title>" in page


def test_a_page_needs_snapshots_of_one_pool() -> None:
    with pytest.raises(ConfigError, match="at least one snapshot"):
        snapshots_to_html([])
    with pytest.raises(ConfigError, match="must be of one pool"):
        snapshots_to_html([make_manager(10).snapshot(), make_manager(11).snapshot()])


def test_the_page_of_a_large_pool_stays_small_while_its_blocks_lie_in_runs() -> None:
    manager = make_manager(50_000, max_model_len=10_000)
    steps: list[Snapshot] = []
    for number in range(5):
        admit(manager, make_request(f"r{number}", range(number, number + 8_000), manager))
        steps.append(manager.snapshot(previous=steps[-1] if steps else None))
    assert len(snapshots_to_html(steps)) < 200_000


def test_the_files_of_the_page_are_part_of_the_package() -> None:
    page = importlib.resources.files("kvcore") / "page"
    assert {file.name for file in page.iterdir()} == {
        "decode.js",
        "lists.js",
        "main.js",
        "page.css",
        "page.html",
        "pool.js",
    }
