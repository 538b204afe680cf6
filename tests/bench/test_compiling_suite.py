"""The suite that times the compiler, at its smallest."""

import pytest

from toolkit.bench.runs import compiling


@pytest.mark.nightly
def test_programs_are_compiled_timed_and_compared():
    case = compiling.compile_case(1, "small")
    results = {name: call() for name, call in case.contenders.items()}
    case.check(results)
    assert set(results) == set(case.facts())
    assert all(found[compiling.COMPILING][0] > 0 for found in case.facts().values())
    name = "experts" + compiling.SCANNED
    with pytest.raises(ValueError, match="experts: a scan has loss"):
        case.check({**results, name: (results[name][0] + 1, None)})
