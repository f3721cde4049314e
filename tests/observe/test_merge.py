import threading
import time

from k8sjob.observe.merge import Ended, Merge


def test_all_sources_come_and_end():
    with Merge() as merge:
        for name in "ab":
            merge.add(name, lambda _stop, name=name: iter([name + "1", name + "2"]))
        items = [merge.get(60) for _ in range(6)]
        assert merge.get(0.01) is None
    assert {item for item in items if isinstance(item, str)} == {"a1", "a2", "b1", "b2"}
    assert {item.source for item in items if isinstance(item, Ended)} == {"a", "b"}
    assert merge.open == set()


def test_the_error_of_a_source_comes_at_its_end():
    def broken(_stop):
        yield 1
        raise ValueError("no more")

    with Merge() as merge:
        merge.add("broken", broken)
        assert merge.get(60) == 1
        assert str(merge.get(60).error) == "no more"


def test_a_source_whose_last_item_says_all_runs_no_further_ahead_than_it_may():
    made = []

    def states(_stop):
        for number in range(100):
            made.append(number)
            yield number

    with Merge() as merge:
        merge.add("states", states, ahead=2)
        merge.add("other", lambda _stop: iter("xyz"))
        deadline = time.monotonic() + 60
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(made) == 3  # two wait, and the third is in hand
        seen = []
        while "states" in merge.open:
            seen.append(merge.get(60))
    assert [item for item in seen if isinstance(item, int)] == list(range(100))


def test_leaving_ends_a_source_that_is_held_back():
    ended = threading.Event()

    def endless(stop):
        try:
            while not stop.is_set():
                yield 1
        finally:
            ended.set()

    with Merge(size=10) as merge:
        merge.add("endless", endless, ahead=1)
        assert merge.get(60) == 1
    assert ended.wait(60)
