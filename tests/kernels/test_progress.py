"""Work that takes long is reported on stderr, with its duration; short work is not."""

import logging
import multiprocessing
import re
import sys
import threading
import time

import pytest

from arbordraft.kernels import progress
from arbordraft.kernels.progress import phase

LONG = 0.15


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "LIVE_AFTER", 0.05)
    monkeypatch.setattr(progress, "MIN_DURATION", 0.05)


def said(capsys):
    shown, told = capsys.readouterr()
    assert shown == "", "stdout belongs to the program"
    return re.sub(r"\d+(\.\d+)? s", "N s", told)


def test_long_work_is_reported_with_its_duration(capsys):
    with phase("reading"):
        time.sleep(LONG)
    shown, told = capsys.readouterr()
    assert shown == ""
    begun, ended = told.splitlines()
    assert begun == "arbordraft: reading ..."
    assert float(re.fullmatch(r"arbordraft: reading: (\d+\.\d) s", ended)[1]) >= 0.1


def test_short_work_is_not_reported(capsys, monkeypatch):
    monkeypatch.setattr(progress, "MIN_DURATION", 5.0)
    for _ in range(50):
        with phase("reading"):
            pass
    assert said(capsys) == ""


def test_of_nested_work_the_innermost_is_reported(capsys):
    with phase("choosing"):
        with phase("packing"):
            time.sleep(LONG)
        with phase("comparing"):
            pass
    lines = said(capsys).splitlines()  # the outer one may follow, if the machine is busy
    assert lines[:2] == ["arbordraft: packing ...", "arbordraft: packing: N s"]
    assert not any("comparing" in line for line in lines)


def test_outer_work_goes_on_after_inner_work(capsys):
    with phase("choosing"):
        with phase("packing"):
            time.sleep(LONG)
        time.sleep(LONG)
    lines = [f"arbordraft: {text}" for text in ("packing ...", "packing: N s", "choosing ...", "choosing: N s")]
    assert said(capsys).splitlines() == lines


def test_failures_end_their_line(capsys):
    @phase("reading")
    def fail():
        time.sleep(LONG)
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert said(capsys).splitlines() == ["arbordraft: reading ...", "arbordraft: reading: N s"]
    with phase("short"):
        pass
    assert said(capsys) == "", "nothing is left of the work that failed"


def test_work_of_two_threads(capsys):
    other, go_on = threading.Event(), threading.Event()

    def work():
        with phase("building"):
            other.set()
            assert go_on.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert other.wait(60)
    with phase("reading"):
        time.sleep(LONG)
    time.sleep(LONG)
    go_on.set()
    thread.join()
    lines = [f"arbordraft: {text}" for text in ("reading ...", "reading: N s", "building ...", "building: N s")]
    assert said(capsys).splitlines() == lines


@pytest.mark.parametrize("live", [True, False])
def test_a_terminal_shows_passing_seconds_in_one_line(capsys, monkeypatch, live):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with phase("reading", live=live):
        time.sleep(LONG)
    begin = "\r\x1b[K"
    first = "arbordraft: reading: N s" if live else "arbordraft: reading ...\n"
    assert said(capsys) == f"{begin}{first}{begin}arbordraft: reading: N s\n"


def test_a_terminal_shows_short_work_as_long_as_it_lasts(capsys, monkeypatch):
    monkeypatch.setattr(progress, "MIN_DURATION", 5.0)
    with phase("reading"):  # control: lines that stay wait longer
        time.sleep(LONG)
    assert said(capsys) == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with phase("reading"):
        time.sleep(LONG)
    assert said(capsys) == "\r\x1b[Karbordraft: reading: N s\r\x1b[K"


def test_a_live_line_fits_into_the_terminal(capsys, monkeypatch):
    """The terminal would wrap a longer line, of which only the last part can be erased."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    with phase("reading " + "x" * 100):
        time.sleep(LONG)
    live, kept = re.findall(r"\r\x1b\[K([^\r\n]*)", capsys.readouterr().err)
    assert len(live) == 39
    assert re.fullmatch(r"arbordraft: reading x{100}: \d\.\d s", kept)


def test_a_log_of_infos_has_it_instead(caplog, capsys):
    with caplog.at_level("INFO", logger="arbordraft"), phase("reading"):
        time.sleep(LONG)
    assert [re.sub(r"\d+\.\d", "N", record.getMessage()) for record in caplog.records] == [
        "reading ...",
        "reading: N s",
    ]
    assert said(capsys) == ""


def test_a_log_level_silences_it(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("arbordraft"), "level", logging.WARNING)
    with phase("reading"):
        time.sleep(LONG)
    assert said(capsys) == ""


def _in_a_child():
    with phase("reading"):
        time.sleep(LONG)


def test_a_forked_process_reports_its_own_work(capfd):
    with phase("choosing"):
        child = multiprocessing.get_context("fork").Process(target=_in_a_child)
        child.start()
        child.join(60)
    assert child.exitcode == 0
    assert "arbordraft: reading: " in capfd.readouterr().err
