import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.cluster import addresses
from toolkit.errors import ClusterError


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("h:1", ("h", 1)),
        ("worker-0.example.com:65535", ("worker-0.example.com", 65535)),
        ("192.0.2.1:2222", ("192.0.2.1", 2222)),
        ("[::1]:2222", ("::1", 2222)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ],
)
def test_an_address_is_a_host_and_a_port(address, parts):
    assert addresses.split(address) == parts
    assert addresses.join(*parts) == address


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("", "empty"),
        (" h:1", "white space around"),
        ("h:1\n", "white space around"),
        ("h :1", "white space inside"),
        ("http://h:1", "begins with 'http://'"),
        ("grpc://h:1", "begins with 'grpc://'"),
        ("h", "port is missing"),
        ("h:", "port is missing"),
        ("[::1]", "port is missing"),
        ("[::1]:", "port is missing"),
        ("[::1]2222", "not a number"),
        ("h:x", "not a number"),
        ("h:١", "not a number"),
        ("h:-1", "not a number"),
        ("h:1.5", "not a number"),
        ("h:0", "no port 0"),
        ("h:65536", "no port 65536"),
        ("h:" + "9" * 5000, "no port 999"),
        (":1", "host before the port is empty"),
        ("::1", "without brackets"),
        ("::1:2222", "without brackets"),
        ("fd00::1:2222", "without brackets"),
        ("a:b:1", "more than one colon"),
        ("h:1,g:2", "more than one colon"),
        ("[::1:2222", "never closed"),
        ("[h]:1", "no IPv6 address"),
        ("[]:1", "no IPv6 address"),
        ("h/x:1", "holds '/'"),
        ("u@h:1", "holds '@'"),
    ],
)
def test_what_is_no_address_says_why(address, found):
    assert any(found in each for each, _ in addresses.faults(address))
    with pytest.raises(ClusterError, match="address"):
        addresses.split(address)


def test_an_address_can_have_several_faults():
    assert len(list(addresses.faults(" http://h :0"))) == 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("localhost:1", "127.0.0.1:1"),
        ("localhost:1", "[::1]:1"),
        ("127.0.0.1:1", "127.0.0.2:1"),
        ("[::ffff:127.0.0.1]:1", "LOCALHOST:1"),
        ("Host.Example.com:1", "host.example.COM.:1"),
        ("[FD00::0:1]:1", "[fd00::1]:1"),
        ("h:80", "h:080"),
    ],
)
def test_spellings_of_one_address_are_the_same(one, other):
    assert addresses.canonical(one) == addresses.canonical(other)


@pytest.mark.parametrize(("one", "other"), [("h:1", "h:2"), ("h:1", "g:1"), ("10.0.0.1:1", "localhost:1")])
def test_other_addresses_are_not(one, other):
    assert addresses.canonical(one) != addresses.canonical(other)


@pytest.mark.parametrize("host", ["localhost", "LocalHost", "127.0.0.1", "127.9.9.9", "::1", "0:0:0:0:0:0:0:1"])
def test_loopback_is_known(host):
    assert addresses.is_loopback(host)


@pytest.mark.parametrize("host", ["h", "10.0.0.1", "fd00::1", "127.example.com", "localhost.example.com", "x:y", ""])
def test_other_hosts_are_not_loopback(host):
    assert not addresses.is_loopback(host)


@given(st.text())
def test_any_text_is_an_address_or_has_a_fault(text):
    if list(addresses.faults(text)):
        with pytest.raises(ClusterError):
            addresses.split(text)
    else:
        assert addresses.canonical(addresses.canonical(text)) == addresses.canonical(text)
