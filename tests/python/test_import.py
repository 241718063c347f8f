"""`import ep` is quick: it loads little, which can be counted where time cannot."""

from python.fault_process import run_alone

# The import stays within its 50 ms by loading little: none of these, each of which takes many.
SLOW = (
    "ast",
    "asyncio",
    "dataclasses",
    "inspect",
    "json",
    "logging",
    "multiprocessing",
    "numpy",
    "socket",
    "subprocess",
    "torch",
)
MOST_MODULES = 55  # beside those of a bare interpreter; half of them typing's and ep's own


def test_import_loads_little():
    said = run_alone(
        """
        before = set(sys.modules)
        import ep
        print(*sorted(set(sys.modules) - before))
        """,
        prelude="",
    )
    loaded = said.split()
    assert "ep.buffer" in loaded
    slow = [name for name in loaded if name.partition(".")[0] in SLOW]
    assert not slow
    assert len(loaded) <= MOST_MODULES, loaded


def test_what_import_leaves_out_is_there_when_it_is_named():
    run_alone(
        """
        import ep
        assert "ep.testing" not in sys.modules
        assert callable(ep.testing.run) and "testing" in dir(ep)
        assert ep.supports("cpu", num_sms=1).ok
        with ep.EPBuffer(num_experts=1, num_topk=1, hidden=8, max_tokens_per_rank=1) as buf:
            buf.warm(layout="expert")
        try:
            ep.no_such_name
        except AttributeError as error:
            assert "no_such_name" in str(error)
        else:
            raise SystemExit("ep has every name")
        """,
        prelude="",
    )
