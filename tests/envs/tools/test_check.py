"""Arguments are checked as JSON Schema says, and the policy is told what is wrong."""

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.envs.tools.check import argument_problem

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["a", "b", ""]) | st.just(1.5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xy"), inner),
    max_leaves=5,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])


@st.composite
def schemas(draw, depth=2):
    schema = {}
    if draw(st.booleans()):
        schema["type"] = draw(TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True))
    if draw(st.integers(0, 4)) == 0:
        schema["enum"] = draw(st.lists(VALUES, min_size=1, max_size=3))
    if draw(st.integers(0, 4)) == 0:
        bounds = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
        schema[draw(st.sampled_from(bounds))] = draw(st.integers(-2, 2))
    if depth and draw(st.booleans()):
        inner = schemas(depth - 1)
        key = draw(st.sampled_from(["items", "prefixItems", "properties", "anyOf"]))
        if key == "items":
            schema["items"] = draw(inner)
        elif key == "properties":
            schema["properties"] = draw(st.dictionaries(st.sampled_from("xy"), inner))
            schema["required"] = draw(st.lists(st.sampled_from("xy"), max_size=1))
            schema["additionalProperties"] = draw(st.booleans() | inner)
        else:
            schema[key] = draw(st.lists(inner, min_size=1, max_size=2))
    return schema


@settings(max_examples=300, deadline=None)
@given(schemas(), VALUES)
def test_a_value_fits_where_jsonschema_says_so(schema, value):
    problem = argument_problem({"v": value}, {"properties": {"v": schema}})
    assert (problem is None) == jsonschema.Draft202012Validator(schema).is_valid(value), problem


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "either": {"anyOf": [{"type": "integer"}, {"type": "array"}]},
        "none": {"type": "integer", "nullable": True},
    },
    "required": ["city"],
}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"city": "Berlin"}, None),
        ({"city": "Berlin", "none": None}, None),
        ({}, "the argument 'city' is missing. Arguments: city, days"),
        ({"town": "x"}, "there is no argument 'town'. Arguments: city, days"),
        ({"citi": "x"}, "there is no argument 'citi'. Did you mean 'city'?"),
        ({"city": 3}, "'city' must be of type string, got 3."),
        ({"city": "x", "days": "3"}, "'days' must be of type integer, got \"3\"."),
        ({"city": "x", "days": 3.0}, "'days' must be of type integer, got 3.0."),
        ({"city": "x", "days": True}, "'days' must be of type integer, got true."),
        ({"city": "x", "days": 0}, "'days' must be at least 1, got 0."),
        ({"city": "x", "unit": "celcius"}, "Did you mean 'celsius'?"),
        ({"city": "x", "place": {}}, "'place' has no 'lat'."),
        ({"city": "x", "place": {"lat": "y"}}, "'place'['lat'] must be of type number"),
        ({"city": "x", "tags": ["a", 2]}, "'tags'[1] must be of type string, got 2."),
        ({"city": "x", "either": "y"}, "must be of type integer, got \"y\". 'either' must be"),
    ],
)
def test_the_problem_is_a_sentence_for_the_policy(arguments, problem):
    found = argument_problem(arguments, SCHEMA)
    assert found is None if problem is None else problem in (found or "")


@pytest.mark.parametrize(
    "schema",
    [{}, {"properties": 3}, {"required": True}, {"properties": {"x": True}}, {"properties":
     {"x": {"enum": "a", "type": 3, "anyOf": {}, "minimum": "1", "items": []}}}],
)  # fmt: skip
def test_schemas_that_are_none_check_nothing(schema):
    arguments = {"x": [1]} if isinstance(schema.get("properties"), dict) else {}
    assert argument_problem(arguments, schema) is None
