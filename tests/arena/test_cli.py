"""The command line itself, whatever the command."""

import pytest

from arena import cli


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "the following arguments are required: COMMAND; see `arena --help`"),
        (("play",), "argument COMMAND: invalid choice: 'play'"),
        (("run",), "the following arguments are required: config; see `arena run --help`"),
        (("bench",), "the following arguments are required: KIND; see `arena bench --help`"),
        (("bench", "pace", "--seats", "x"), "argument --seats: invalid int value: 'x'"),
        (("plan", "--layers", "nan"), "argument --layers: invalid int value: 'nan'"),
        (("simulate", "batching", "--slots", "inf"), "invalid int value: 'inf'"),
        (("simulate", "paging", "--memory", "-5GiB"), "argument --memory: expected one argument"),
        (("doctor", "a\nb\x1b[31m"), "unrecognized arguments: a b [31m;"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("arena: ")
    assert told in line
