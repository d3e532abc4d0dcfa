"""A program over several processes is no file of one of them."""

import pytest
from runs import passed


@pytest.mark.slow
def test_refused(tmp_path):
    """Each process refuses, names the mesh, and writes nothing."""
    saved = tmp_path / "saved"
    saved.mkdir()
    said = passed(
        tmp_path,
        f"""
        path = os.path.join({str(saved)!r}, str(me))
        x = d.host_local_to_global(part(np.arange(8.0, dtype=np.float32)), mesh, P("data"))
        compiled = pjit(lambda x: x + 1, in_axis_resources=P("data"), mesh=mesh).lower(x).compile()
        try:
            compiled.save(path)
        except spmd.BundleError as error:
            say(error)
        assert not os.path.exists(path)
        """,
    )
    refusal = (
        "pjit of `<lambda>` cannot be saved: it does not run on devices of this process alone.\n"
        "  expected  a mesh of devices of this process\n"
        "  got       mesh data=4, model=2, of several processes"
    )
    assert said == [refusal] * 2
    assert not list(saved.iterdir())
