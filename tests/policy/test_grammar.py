# ruff: noqa: E501 - a case stands on one line
import pytest

from actstore.codecs import Int8, Raw
from actstore.errors import ActstoreError, ChainError, PolicyError, UnknownCodecError
from actstore.policy import Derive, Encode, Keep, Offload, Recompute, Rules, parse, parse_decision
from tests.policy.codecs import Needy, Options, Wrap, these_codecs


@pytest.fixture(autouse=True, scope="module")
def more_codecs():
    with these_codecs():
        yield


@pytest.mark.parametrize(
    ("text", "decision"),
    [
        ("keep", Keep()),
        ("raw", Encode(Raw())),
        ("  int8  ", Encode(Int8())),
        ("int8()", Encode(Int8())),
        ("raw @ device", Encode(Raw())),
        ("int8@host", Offload(Int8(), "host")),
        ("int8 @ device > disk", Offload(Int8(), ("device", "disk"))),
        ("derive", Derive()),
        ("derive(keep)", Derive(Keep())),
        ("derive( raw@host>disk )", Derive(Offload(Raw(), ("host", "disk")))),
        ("derive(int8 @ host)", Derive(Offload(Int8(), "host"))),
        ("recompute", Recompute(Keep())),
        ("recompute(keep)", Recompute(Keep())),
        ("recompute( raw@disk )", Recompute(Offload(Raw(), "disk"))),
        ("recompute(raw@disk , segment = 4)", Recompute(Offload(Raw(), "disk"), segment=4)),
        ("recompute(slots=3, schedule=revolve)", Recompute(schedule="revolve", slots=3)),
        ("unprotected int8", Encode(Int8(), protected=False)),
        ("recompute(int8, decisions=anew)", Recompute(Encode(Int8()), decisions="anew")),
        ("recompute(decisions=kept, segment=2)", Recompute(segment=2, decisions="kept")),
        ("recompute(unprotected int8 @ host)", Recompute(Offload(Int8(), "host", protected=False))),
        ("options(flag)", Encode(Options(flag=True))),
        ("options(flag=false, on=false)", Encode(Options(on=False))),
        ("options(count=64, flag, ratio=1e-3,)", Encode(Options(flag=True, count=64, ratio=0.001))),
        ("options(ratio=2, count=-4)", Encode(Options(ratio=2.0, count=-4))),
        ("options(mode=dither, word=W_1)", Encode(Options(mode="dither", word="W_1"))),
        ("wrap(int8)", Encode(Wrap(Int8()))),
        ("wrap(inner=options(flag), share=.5) @ host", Offload(Wrap(Options(flag=True), 0.5), "host")),
        ("needy(wrap(raw))", Encode(Needy(Wrap(Raw())))),
    ],
)
def test_decisions(text, decision):
    assert parse_decision(text) == decision
    assert parse(text) == Rules(default=decision)
    assert parse(f"* : {text}") == Rules(default=decision)


def test_rules_stand_on_lines_or_between_semicolons():
    text = """
        # attention first
        blocks.*.attn : int8 @ host   # quantized, then pinned memory
        blocks.*.mlp:recompute(raw @ host);head : keep;;

        *             : int8
    """
    assert parse(text) == Rules(
        [
            ("blocks.*.attn", Offload(Int8(), "host")),
            ("blocks.*.mlp", Recompute(Offload(Raw(), "host"))),
            ("head", Keep()),
        ],
        default=Encode(Int8()),
    )


def test_what_no_rule_covers_is_kept():
    assert parse("head : int8").default == Keep()


DEFAULTS = "count=128, ratio=0.5, mode=nearest, word=plain"

# the text, with the wrong part between « and », the class of the error, and its words after the place
ERRORS = [
    ("int8 @ «hots»", PolicyError, "expected a tier, found 'hots'. Did you mean 'host'? The tiers are device, group, host, disk."),
    ("int8 @ «cuda»", PolicyError, "expected a tier, found 'cuda'. Did you mean 'device'? The tiers are device, group, host, disk."),
    ("int8 @ «cpu»", PolicyError, "expected a tier, found 'cpu'. Did you mean 'host'? The tiers are device, group, host, disk."),
    ("«cpu»", PolicyError, "'cpu' is a tier, not a codec. For the bytes as they are, write 'raw @ host'."),
    ("int8 @«»", PolicyError, "expected a tier, found the end of the rule. The tiers are device, group, host, disk."),
    ("a : «raw @ disk > host»", ChainError, "the ladder 'disk > host' goes up. Each tier holds what the one before refuses: 'host > disk'."),
    ("«raw @ host > host» # x", ChainError, "the ladder 'host > host' names a tier twice. Each tier holds what the one before refuses: 'host'."),
    ("«host»", PolicyError, "'host' is a tier, not a codec. For the bytes as they are, write 'raw @ host'."),
    ("a\t:\t«host»", PolicyError, "'host' is a tier, not a codec. For the bytes as they are, write 'raw @ host'."),
    ("raw «>» host", PolicyError, "'>' is unexpected after 'raw'. A tier stands after '@': 'raw @ host'."),
    ("raw @ host «@» disk", PolicyError, "'@' is unexpected after 'raw @ host'. A further tier stands after '>': 'raw @ host > disk'."),
    ("keep «@» host", PolicyError, "'@' is unexpected after 'keep'. Keep takes nothing more: to move tensors away, write 'raw @ host'."),
    ("derive «@» host", PolicyError, "'@' is unexpected after 'derive'. What happens to all other tensors stands in parentheses: 'derive(raw @ host)'."),
    ("derive(raw«»", PolicyError, "expected ')' to close 'derive(', found the end of the rule."),
    ("«derive(recompute)»", ChainError, "derive takes the decision on all other tensors, such as Keep() or Offload(Raw(), 'host'), not recompute."),
    ("recompute «@» host", PolicyError, "'@' is unexpected after 'recompute'. What happens to the inputs stands in parentheses: 'recompute(raw @ host)'."),
    ("recompute(raw @ host«»", PolicyError, "expected ')' to close 'recompute(', found the end of the rule."),
    ("recompute(«)»", PolicyError, "expected a codec, 'keep', 'derive' or 'recompute', found ')'."),
    ("recompute(«segment»)", PolicyError, "'segment' must have a value: write 'segment=4'."),
    ("recompute(raw, segment=«1.5»)", PolicyError, "recompute takes a number of calls for 'segment', not '1.5'."),
    ("recompute(«segments»=4)", PolicyError, "recompute has no option 'segments'. Did you mean 'segment'? Its options are segment=4, schedule=auto, slots=10, first=100, tiles=8, decisions=anew."),
    ("recompute(segment=4, «segment»=5)", PolicyError, "recompute is given 'segment' twice. Leave one out."),
    ("recompute(schedule=«revolved», slots=2)", PolicyError, "'revolved' is not a schedule. Did you mean 'revolve'? The schedules are sqrt, revolve, auto."),
    ("recompute(int8, decisions=«again»)", PolicyError, "recompute's decisions must be kept or anew, not 'again'."),
    ("recompute(segment=4«»", PolicyError, "expected ')' to close 'recompute(', found the end of the rule."),
    ("«recompute(slots=3)»", ChainError, "slots=3 is for schedule=revolve. Write recompute(schedule=revolve, slots=3), or leave slots out."),
    ("«recompute(recompute)»", ChainError, "the inputs of a recomputed module cannot be recomputed or derived themselves. Keep, encode or offload them, as in recompute(keep), recompute(int8), recompute(raw @ host)."),
    ("options(«coutn»=2)", PolicyError, f"options has no option 'coutn'. Did you mean 'count'? Its options, with their defaults, are flag=false, on=true, {DEFAULTS}."),
    ("options(«sparse»)", PolicyError, f"'sparse' is not a flag of options. Its options, with their defaults, are flag=false, on=true, {DEFAULTS}."),
    ("options(«count»)", PolicyError, "'count' must have a value: write 'count=' and a whole number."),
    ("wrap(«inner»)", PolicyError, "'inner' must have a value: write 'inner=' and a codec."),
    ("options(«flg»)", PolicyError, f"'flg' is not a flag of options. Did you mean 'flag'? Its options, with their defaults, are flag=false, on=true, {DEFAULTS}."),
    ("options(«64»)", PolicyError, f"'64' is not a flag of options. Its options, with their defaults, are flag=false, on=true, {DEFAULTS}."),
    ("raw(«fast»)", PolicyError, "'fast' is not a flag of raw. It has no options."),
    ("options(count=«1.5»)", PolicyError, "options takes a whole number for 'count', not '1.5'."),
    ("options(count=«)»", PolicyError, "options takes a whole number for 'count', not ')'."),
    ("options(word=«)»", PolicyError, "options takes a word for 'word', not ')'."),
    ("options(ratio=«half»)", PolicyError, "options takes a number for 'ratio', not 'half'."),
    ("options(flag=«1»)", PolicyError, "options takes true or false for 'flag', not '1'."),
    ("options(mode=«down»)", PolicyError, "options takes one of nearest, dither for 'mode', not 'down'."),
    ("options(flag, «flag»=true)", PolicyError, "options is given 'flag' twice. Leave one out."),
    ("options(flag «count»=2)", PolicyError, "expected ',' or ')' in the options of options, found 'count'."),
    ("options(flag«»", PolicyError, "expected ',' or ')' in the options of options, found the end of the rule."),
    ("x : «options(count=3)» @ host", ChainError, "options: count=3 is odd. Give an even one."),
    ("«needy» @ host", PolicyError, "needy needs its option 'inner'. Its options, with their defaults, are inner."),
    ("unprotected «keep»", PolicyError, "'keep' cannot stand inside another decision. Write a codec such as 'int8' or 'raw'."),
    ("wrap(«keep»)", PolicyError, "'keep' cannot stand inside another decision. Write a codec such as 'int8' or 'raw'."),
    ("wrap(inner=«host»)", PolicyError, "'host' is a tier, not a codec. For the bytes as they are, write 'raw @ host'."),
    ("blocks«.»attn", PolicyError, "unexpected '.'. Is a colon missing? A rule reads 'pattern : decision', such as 'blocks.*.attn : int8 @ host'."),
    ("a : int8\n  «b int8 @ host» # c", PolicyError, "'b int8 @ host' has no colon. Among several rules each reads 'pattern : decision', and '* : decision' comes last, for all that no other rule covers."),
    ("a :«»", PolicyError, "expected a codec, 'keep', 'derive' or 'recompute', found the end of the rule."),
    ("«a b» : int8", PolicyError, "'a b' is not a pattern. Write a module name, in which * stands for anything, such as 'blocks.*.attn'. After a slash stands the name of a tagged tensor, such as 'blocks.*/qkv', or operators, such as 'blocks.*/@sdpa'."),
    ("«a/b/c» : int8", PolicyError, "'a/b/c' is not a pattern. Write a module name, in which * stands for anything, such as 'blocks.*.attn'. After a slash stands the name of a tagged tensor, such as 'blocks.*/qkv', or operators, such as 'blocks.*/@sdpa'."),
    ("a : int8; «»: int8", PolicyError, "'' is not a pattern. Write a module name, in which * stands for anything, such as 'blocks.*.attn'. After a slash stands the name of a tagged tensor, such as 'blocks.*/qkv', or operators, such as 'blocks.*/@sdpa'."),
    ("\n\t«a/b : recompute»", PolicyError, "rule 'a/b : recompute' recomputes a tag, but a tag names tensors and recompute wraps modules. Write 'a : recompute'."),
    ("a:int8\n  «a:raw»", PolicyError, "rule 'a : raw' can never apply: rule 1 is 'a : int8', the same pattern. Leave one of them out."),
    ("x:raw\n*:int8\n  «b : raw»", PolicyError, "rule 'b : raw' can never apply: rule 2 is '* : int8', which covers all that this one does. The first match wins: put 'b' before it."),
]  # fmt: skip


@pytest.mark.parametrize(("marked", "kind", "words"), ERRORS, ids=[case[0] for case in ERRORS])
def test_an_error_says_what_is_wrong_where_and_what_to_do(marked, kind, words):
    text = marked.replace("«", "").replace("»", "")
    before, wrong = marked.split("«")[0], marked.split("«")[1].split("»")[0]
    line, column = before.count("\n") + 1, len(before.rpartition("\n")[2]) + 1
    with pytest.raises(ActstoreError) as caught:
        parse(text)
    error = caught.value
    assert type(error) is kind
    assert (error.line, error.column) == (line, column)
    head, shown, carets = str(error).split("\n")
    assert head == f"policy, line {line}, column {column}: {words}"
    assert shown.strip() == text.split("\n")[line - 1].strip().replace("\t", " ")
    assert carets.strip() == "^" * max(len(wrong), 1)
    start = carets.index("^")
    assert shown[start : start + len(wrong)] == wrong


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("int9 @ host", 1, ["int9", "int8"]),
        ("blocks : imt8", 10, ["imt8", "int8"]),
        ("head keep", 1, ["If 'head' is a module, a colon is missing: 'head : keep'"]),
        ("kep", 1, ["kep", "Did you mean 'keep'?"]),
        ("wrap(recomputed)", 6, ["Did you mean 'recompute'?"]),
    ],
)
def test_an_unknown_codec_is_named_with_near_ones(text, place, words):
    with pytest.raises(UnknownCodecError) as caught:
        parse(text)
    assert caught.value.column == place
    assert str(caught.value).startswith(f"policy, line 1, column {place}: ")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["", "   \n ", "# only a comment", ";;"])
def test_a_text_without_rules(text):
    with pytest.raises(PolicyError, match=r"the policy text holds no rule. Write a decision such as 'int8'"):
        parse(text)


@pytest.mark.parametrize("text", ["a : int8", "a : int8; b : raw", "* : raw"])
def test_a_decision_alone_is_asked_for(text):
    with pytest.raises(PolicyError, match=r"is a rule or several. Give one decision alone, such as 'int8 @ host'"):
        parse_decision(text)
