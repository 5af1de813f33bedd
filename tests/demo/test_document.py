"""The demo's texts: long enough, and no two prompts with a common beginning unless they are to share it."""

from __future__ import annotations

from umbp.cli.demo import document


def test_the_document_is_the_same_text_each_time_and_ends_with_the_question() -> None:
    one, two = document.long_document(1), document.long_document(1)
    assert one == two
    assert one.text.endswith(document.QUESTION)


def test_editions_and_the_changed_document_part_in_their_first_words() -> None:
    texts = [document.long_document(edition).text for edition in range(5)]
    texts.append(document.changed_document(1).text)
    heads = {" ".join(text.split()[:2]) for text in texts}
    assert len(heads) == len(texts)


def test_the_changed_document_differs_from_its_edition_in_one_word_only() -> None:
    original, changed = document.long_document(3).text.split(), document.changed_document(3).text.split()
    assert len(original) == len(changed)
    assert [i for i, (one, other) in enumerate(zip(original, changed, strict=True)) if one != other] == [0]


def test_fillers_of_all_editions_part_in_their_first_line() -> None:
    fillers = [prompt for edition in range(4) for prompt in document.fillers(edition)]
    lines = {prompt.text.splitlines()[0] for prompt in fillers}
    assert len(lines) == len(fillers) == 4 * document.FILLERS


def test_fillers_are_bodies_of_the_length_that_was_asked_for() -> None:
    for prompt in document.fillers(2):
        assert len(prompt.text) >= document.FILLER_CHARACTERS
