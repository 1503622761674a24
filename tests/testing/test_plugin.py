"""The pytest plugin, in pytest runs of its own."""

import pytest

from torchcrew.testing import plugin
from torchcrew.testing.permanent import PERMANENT

pytest_plugins = ["pytester"]


@pytest.fixture
def run_tests(pytester):
    """Run the given tests with the plugin, in a process of their own."""

    def run(source, *, ini="leaks_deadline = 0.2"):
        pytester.makeini(f"[pytest]\n{ini}\n")
        pytester.makepyfile(source)
        plugins = ("-p", "torchcrew.testing.plugin", "-p", "no:cacheprovider", "--strict-markers")
        return pytester.runpytest_subprocess(*plugins, timeout=15)

    return run


def test_a_leak_fails_the_test_that_made_it_only(run_tests):
    """The leaking test gets an error that says what; tests before and after pass."""
    result = run_tests(
        """
        import os
        def test_before(): pass
        def test_leak(): os.pipe()
        def test_after(): pass
        def test_other_leak(): os.environ["FORGOTTEN"] = "1"
        def test_end(): pass
        """
    )
    result.assert_outcomes(passed=5, errors=2)
    result.stdout.re_match_lines([
        r".*ERROR at teardown of test_leak.*",
        r".*::test_leak left something behind, 2 leaks:",
        r"  descriptor: \d+ \(pipe\) -> pipe:\[\d+\]",
        r".*ERROR at teardown of test_other_leak.*",
        r".*1 leak:",
        r"  environment: FORGOTTEN was set",
    ])  # fmt: skip


def test_a_test_can_opt_out_with_a_reason(run_tests):
    """The marker skips the check; without a reason it is an error."""
    result = run_tests(
        """
        import os, pytest
        @pytest.mark.leaks_allowed(reason="kept for the session")
        def test_kept(): os.pipe()
        @pytest.mark.leaks_allowed
        def test_no_reason(): pass
        """
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*the marker leaks_allowed needs a reason*"])


def test_a_failed_test_gets_its_leaks_as_a_section(run_tests):
    """Its traceback holds its variables, so they are told, not counted as a second error."""
    result = run_tests(
        """
        import pytest
        def test_fails():
            file = open("/dev/null")
            assert file.closed
        def test_next(): pass
        @pytest.mark.xfail
        def test_is_expected_to_fail():
            file = open("/dev/null")
            assert file.closed
        """
    )
    result.assert_outcomes(passed=1, failed=1, xfailed=1)
    result.stdout.fnmatch_lines(["*leaks*", "1 leak:", "  descriptor: * (device) -> /dev/null"])


def test_fixtures_are_not_blamed_on_tests(run_tests):
    """What a wider fixture holds is not the test's; what a function's fixture leaves behind is."""
    result = run_tests(
        """
        import os, pytest
        @pytest.fixture(scope="module")
        def wide():
            ends = os.pipe()
            yield
            for end in ends: os.close(end)
        @pytest.fixture
        def clean():
            ends = os.pipe()
            yield
            for end in ends: os.close(end)
        @pytest.fixture
        def leaking():
            os.pipe()
        def test_wide(wide): pass
        def test_clean(clean, tmp_path, capfd, monkeypatch): monkeypatch.setenv("A", "1")
        def test_leaking(leaking): pass
        """
    )
    result.assert_outcomes(passed=3, errors=1)


@pytest.mark.parametrize(("deadline", "outcomes"), [("0", {"errors": 1}), ("5", {})])
def test_the_deadline_is_an_option(run_tests, deadline, outcomes):
    """A thread that ends after 0.3 s is a leak for who waits less."""
    source = "import threading, time\ndef test_slow(): threading.Thread(target=time.sleep, args=(0.3,)).start()\n"
    run_tests(source, ini=f"leaks_deadline = {deadline}").assert_outcomes(passed=1, **outcomes)


def test_a_wrong_deadline_is_refused(run_tests):
    """The message names the option and what it takes, before any test runs."""
    result = run_tests("def test_it(): pass", ini="leaks_deadline = soon")
    result.stderr.fnmatch_lines(["ERROR: leaks_deadline should be a number of seconds, but got 'soon'"])


def test_leaks_can_be_ignored(run_tests):
    """A leak in whose text an expression is found is left out; another still fails its test."""
    source = "import os\ndef test_leak(): os.environ['KEPT'] = '1'\ndef test_other(): os.environ['FORGOTTEN'] = '1'\n"
    ini = "leaks_deadline = 0.2\nleaks_ignore =\n    ^environment: KEPT \n    no such (leak|thing)"
    result = run_tests(source, ini=ini)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*::test_other left something behind, 1 leak:", "  environment: FORGOTTEN was set"])


def test_a_wrong_expression_is_refused(run_tests):
    """The message names the option and the expression, before any test runs."""
    result = run_tests("def test_it(): pass", ini="leaks_ignore = (open")
    result.stderr.fnmatch_lines(["ERROR: leaks_ignore should have regular expressions, but got '(open': *"])


def test_the_plugin_says_what_it_knows():
    """Its documentation has the marker, the options and every permanent thing."""
    for name in ("leaks_allowed", "leaks_deadline", "leaks_ignore", *PERMANENT):
        assert name in plugin.__doc__
