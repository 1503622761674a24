"""`torchcrew demo`: equal results on both engines, figures, a picture; and its parts."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from torchcrew.cli import demo, demo_rounds
from torchcrew.cli.demo_digits import SIDE, ColouredDigits, DigitArrays
from torchcrew.cli.demo_memory import PssSampler, process_tree, tree_pss
from torchcrew.cli.demo_rounds import RunFailed, run_once, same_results, summarise

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

COMMAND = [sys.executable, "-c", "from torchcrew.cli import main; main()", "demo"]
#: The same with a third of the images: 360 for the test, which are always as many, and few to train with.
SHORT = """
import torchcrew.cli.demo_digits as digits
from torchcrew.cli import main
read = digits.load_digit_arrays()
digits.load_digit_arrays = lambda: digits.DigitArrays(read.images[:616], read.labels[:616])
main()
"""


@pytest.fixture(scope="module")
def digits() -> DigitArrays:
    from torchcrew.cli.demo_digits import load_digit_arrays

    return load_digit_arrays()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "command",
    [[sys.executable, "-c", SHORT, "demo"], pytest.param(COMMAND, marks=pytest.mark.faults)],
    ids=["short", "all"],
)
def test_the_demo_gives_equal_results_and_a_picture(tmp_path, command):
    """One epoch of everything: both engines really ran, their results are equal, table, JSON and PNG are there."""
    done = subprocess.run(
        [*command, "--epochs", "1", "--rounds", "1", "--json", "figures.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("time to the first batch", "images per second", "waited for data", "peak memory", "accuracy equal"):
        assert words in done.stdout
    assert f"plot: {tmp_path / 'torchcrew-demo.png'} (--output" in done.stdout
    assert "PSS leaves out stock's batches on their way" in done.stdout
    document = json.loads((tmp_path / "figures.json").read_text())
    assert document["equal"] == {"accuracy": True, "losses": True, "weights": True}
    engines = {run["engine"]: run["result"]["iterator"].split(".")[0] for run in document["runs"]}
    assert engines == {"stock": "torch", "torchcrew": "torchcrew"}
    assert all(summary["peak_bytes"] > 50e6 for summary in document["medians"].values())
    assert (tmp_path / "torchcrew-demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("theirs", "our", "more_is_better", "shown"),
    [
        (2.0, 1.0, False, ("0.50x", "better")),
        (2.0, 3.0, False, ("1.50x", "worse")),
        (2.0, 3.0, True, ("1.50x", "better")),
        (2.0, 1.0, True, ("0.50x", "worse")),
        (2.0, 2.001, False, ("1.00x", "equal")),
        (0.0, 0.0, False, ("-", "equal")),
        (0.0, 1.0, False, ("-", "worse")),
    ],
)
def test_every_ratio_says_which_way_it_goes(theirs, our, more_is_better, shown):
    """Less time is better and more images are; a difference that the ratio does not show is none."""
    assert tuple(map(str, demo._comparison(theirs, our, more_is_better=more_is_better))) == shown


def test_missing_packages_are_named(tmp_path):
    """Without scikit-learn the demo says what to install."""
    code = "import sys; sys.modules['sklearn'] = None; from torchcrew.cli import main; sys.argv[1:] = ['demo']; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "scikit-learn" in done.stdout
    assert "pip install 'torchcrew[demo]'" in done.stdout


@pytest.mark.timeout(60)
def test_a_run_that_fails_shows_the_end_of_its_stderr(digits):
    """A training process that raises is an error with its last words, not a hang."""
    spec = {"engine": "no such engine", "epochs": 1, "workers": 1, "seed": 0}
    with pytest.raises(RunFailed, match="KeyError: 'no such engine'"):
        run_once(spec, digits.to_bytes(), lambda event: None, sample_memory=False)


@pytest.mark.timeout(60)
def test_a_silent_run_is_given_up(digits, monkeypatch):
    """A training process that says nothing any more is ended after the deadline."""
    monkeypatch.setattr(demo_rounds, "SILENCE_S", 0.05)
    spec = {"engine": "stock", "epochs": 1, "workers": 1, "seed": 0}
    started = time.monotonic()
    with pytest.raises(RunFailed, match="said nothing"):
        run_once(spec, digits.to_bytes(), lambda event: None, sample_memory=False)
    assert time.monotonic() - started < 15


def test_samples_are_drawn_from_torchs_generator_alone(digits):
    """The same seed gives the same sample, another one another; shape, type and range are as stated."""
    dataset = ColouredDigits(digits, train=True)
    torch.manual_seed(5)
    first, label = dataset[3]
    other, _ = dataset[3]
    torch.manual_seed(5)
    again, _ = dataset[3]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (3, SIDE, SIDE)
    assert first.dtype == torch.float32
    assert first.min() >= 0
    assert first.max() <= 1
    assert label in range(10)


def test_training_and_test_images_are_apart(digits):
    """Every image is in exactly one of the two sets."""
    train, test = ColouredDigits(digits, train=True), ColouredDigits(digits, train=False)
    assert (len(train), len(test)) == (1437, 360)
    rows = torch.cat([train.images, test.images]).flatten(1)
    assert torch.equal(rows.sum(1).sort().values, torch.from_numpy(digits.images).flatten(1).sum(1).sort().values)


def test_equal_means_to_the_last_digit():
    """One bit of one loss is a difference."""
    result = {"accuracy": 0.9, "losses": [1.0, 0.5], "weights": "ab"}
    other = {**result, "losses": [1.0, 0.5000000000000001]}
    runs = [demo_rounds.Run("stock", result, []), demo_rounds.Run("torchcrew", other, [])]
    assert same_results(runs) == {"accuracy": True, "losses": False, "weights": True}


def test_summary_is_the_median():
    """Medians over rounds; the peak comes from the run for memory."""
    results = [
        {"images": 100, "train_s": s, "wait_s": s / 4, "first_batch_s": [s], "accuracy": 0.9} for s in (1.0, 2.0, 9.0)
    ]
    runs = [demo_rounds.Run("stock", result, []) for result in results]
    summary = summarise(runs, demo_rounds.Run("stock", results[0], [(0.0, 5), (0.1, 7), (0.2, 6)]))
    assert (summary.images_per_s, summary.wait_s, summary.wait_share, summary.peak_bytes) == (50.0, 0.5, 0.25, 7)


def test_memory_of_a_tree_includes_grandchildren():
    """PSS is summed over descendants, and a process that is gone counts as nothing."""
    holder = "x = bytearray(60 << 20); print(1, flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holder!r}])"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        sampler = PssSampler(child.pid)
        assert child.stdout.readline() == "1\n"
        assert len(process_tree(child.pid)) == 2
        assert tree_pss(child.pid) > 60 << 20
        time.sleep(0.3)
        samples = sampler.stop()
        child.communicate("\n", timeout=10)
    assert samples[-1][1] > 60 << 20
    assert tree_pss(child.pid) == 0
