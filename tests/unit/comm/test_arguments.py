"""Are the arguments of many arrays compared as if each had a name of its own?"""

from __future__ import annotations

import json

from shardload.comm.agreement import Arguments, Invocation, compact

OWN = [(f"array ['{k}']", {"path": "'a.h5'", "spec": f"P({k})"}) for k in range(3)]


def test_names_are_made_for_each_array() -> None:
    told = Arguments({"timeout": "1"}, OWN).also({"a plan": "x"})
    assert list(told.items()) == [
        ("timeout", "1"),
        *((f"{name} of array ['{k}']", text) for k in range(3) for name, text in (("path", "'a.h5'"), ("spec", f"P({k})"))),
        ("a plan", "x"),
    ]
    assert told["spec of array ['1']"] == "P(1)" and len(told) == 8


def test_one_text_stands_for_all_and_for_no_others() -> None:
    """Wrong if the arguments of two arrays could be exchanged, or text could move from one place to another."""
    others = [
        Arguments({"timeout": "1"}, OWN),
        Arguments({"timeout": "1"}, OWN).also({"a plan": "x"}),
        Arguments({"timeout": "2"}, OWN),
        Arguments({"timeout": "1"}, OWN[:2]),
        Arguments({"timeout": "1"}, [OWN[1], OWN[0], OWN[2]]),
        Arguments({"timeout": "1"}, [(OWN[0][0], OWN[1][1]), (OWN[1][0], OWN[0][1]), OWN[2]]),
        Arguments({"timeout": "1", **OWN[0][1]}, OWN[1:]),
        {"timeout": "1"},
        {"timeout": "1", "a plan": "x"},
        {"timeout": '1", "a plan": "x'},
    ]
    assert len({compact(one) for one in others}) == len(others)
    assert len({Invocation("load", "", one).digest for one in others}) == len(others)
    assert Invocation("load", "", others[0]).digest != Invocation("plan", "", others[0]).digest
    again = Arguments(json.loads('{"timeout": "1"}'), [(where, dict(told)) for where, told in OWN])
    assert compact(again) == compact(others[0])
    assert Invocation("load", "", again).also(x="y").digest == Invocation("load", "z", others[0]).also(x="y").digest
