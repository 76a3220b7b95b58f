import pytest

from actstore.base.note import Note


@pytest.mark.parametrize(
    ("note", "text"),
    [
        (Note(), ""),
        (Note(kept=True), ""),
        (Note("small"), "small"),
        (Note("small", kept=True), "kept: small"),
        (Note.no_room(("host", "disk")), "kept: no room in host > disk"),
        (Note(decisions="relu"), "relu"),
        (Note("too late", kept=True, decisions="relu"), "kept: too late; relu"),
    ],
)
def test_a_note_is_the_text_of_the_report(note, text):
    assert str(note) == text
    assert bool(note) is bool(text)
