import pytest

from toolkit.cluster.discovery import expand, expand_counts
from toolkit.errors import ClusterError


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        ("n0", ["n0"]),
        ("n[0-3,7],gpu-a", ["n0", "n1", "n2", "n3", "n7", "gpu-a"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1-2]-ib.example.com", ["n1-ib.example.com", "n2-ib.example.com"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("b,a,b", ["b", "a", "b"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_host_lists_are_written_out_in_their_order(hosts, found):
    assert list(expand(hosts)) == found


@pytest.mark.parametrize(
    "hosts", ["", ",", "a,", ",a", "a,,b", "n[", "n]", "n[]", "n[a]", "n[3-1]", "n[1-]", "n[1[2]]", "a b"]
)
def test_what_is_no_host_list_is_refused(hosts):
    with pytest.raises(ClusterError, match="Slurm"):
        expand(hosts)


def test_a_list_of_endless_length_is_refused_before_it_is_written_out():
    with pytest.raises(ClusterError, match="100,000"):
        expand("n[0-999999999]")


@pytest.mark.parametrize(("counts", "found"), [("2", (2,)), ("2(x3),1", (2, 2, 2, 1)), ("1,2,1(x2)", (1, 2, 1, 1))])
def test_counts_are_written_out(counts, found):
    assert expand_counts(counts) == found


@pytest.mark.parametrize("counts", ["", "2,", "x", "2(x)", "2x3", "-1", "1(x999999)"])
def test_what_is_no_list_of_counts_is_refused(counts):
    with pytest.raises(ClusterError, match="Slurm"):
        expand_counts(counts)
