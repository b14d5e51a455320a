//! The engine against Jinja in Python (`tests/fixtures/jinja.json`, made by `render.py` beside it).

use super::*;
use crate::ink::Alphabet;
use crate::json::Json;

const GOLDENS: &str = include_str!("../../tests/fixtures/jinja.json");

fn text(json: &Json) -> &str {
    match json {
        Json::String(text) => text,
        other => panic!("{other:?}"),
    }
}

fn render(source: &str, variables: &str) -> Result<String> {
    render_json(source, &Json::parse(variables).unwrap())
}

fn render_json(source: &str, variables: &Json) -> Result<String> {
    let template = Template::compile("test", source)?;
    template.render(Paint::Plain.json(variables), None, &template.moment())
}

#[test]
fn every_construct_renders_as_in_python() {
    let goldens = Json::parse(GOLDENS).unwrap();
    let variables = goldens.field("variables").unwrap();
    let Some(Json::Array(cases)) = goldens.field("cases") else { panic!("no cases") };
    assert!(cases.len() > 70);
    let mut wrong = Vec::new();
    for case in cases {
        let name = text(case.field("name").unwrap());
        let rendered = render_json(text(case.field("source").unwrap()), variables);
        match (case.field("text"), rendered) {
            (Some(expected), Ok(rendered)) if rendered == text(expected) => {}
            (None, Err(_)) => {}
            (expected, rendered) => wrong.push(format!("{name}\n  want {expected:?}\n  have {rendered:?}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_a_template_raises_is_the_error() {
    let nested = "{% macro m() %}\n\n{{ raise_exception('roles must alternate') }}{% endmacro %}{{ m() }}";
    let expected = |line| Error::Render { line, problem: "roles must alternate".into() };
    assert_eq!(render("\n{{ raise_exception('roles must alternate') }}", "{}"), Err(expected(Some(2))));
    assert!(matches!(
        render(nested, "{}"),
        Err(Error::Render { problem, .. }) if problem == "roles must alternate"
    ));
}

#[test]
fn a_template_that_does_not_compile_names_itself_and_the_line() {
    let error = render("a\n{% if %}", "{}").unwrap_err();
    assert!(matches!(&error, Error::Template { name, line: Some(2), .. } if name == "test"), "{error}");
}

#[test]
fn generation_tags_vanish_with_their_white_space_control() {
    for (source, text) in [
        ("a {% generation %}b{% endgeneration %} c", "a b c"),
        ("a {%- generation -%} b {%- endgeneration -%} c", "abc"),
        ("a\n  {% generation %}\nb\n  {%endgeneration%}\nc", "a\nb\nc"),
        (
            "{{ '{% generation' }}{% if '%}' %}x{% endif %}{% generation %}y{% endgeneration %}",
            "{% generationxy",
        ),
    ] {
        assert_eq!(render(source, "{}"), Ok(text.to_owned()), "{source}");
    }
}

#[test]
fn a_broken_tag_is_an_error_of_the_template() {
    for source in ["a {%", "{%}", "{%%}", "{% generation %}", "{%-", "{{", "{#"] {
        assert!(matches!(render(source, "{}"), Err(Error::Template { .. })), "{source}");
    }
}

#[test]
fn the_clock_is_read_once_for_a_prompt() {
    let template = Template::compile("test", "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}").unwrap();
    let moment = template.moment();
    let render = || template.render(Value::UNDEFINED, None, &moment).unwrap();
    let first = render();
    assert_eq!(first.len(), "2026-01-01 00:00:00".len());
    assert!(first.starts_with("20"));
    assert_eq!(render(), first);
}

#[test]
fn a_wrong_clock_format_is_an_error_of_the_template() {
    let error = render("{{ strftime_now('%!') }}", "{}").unwrap_err();
    assert!(matches!(error, Error::Render { .. }), "{error}");
}

#[test]
fn methods_that_only_look_see_through_ink() {
    let alphabet = Arc::new(Alphabet::new(["<think>".to_owned(), "/nothink".to_owned()]));
    let ink = Arc::new(Ink::new(&alphabet, "").unwrap());
    let variables = Json::parse(r#"{"x": " <think> hi/nothink"}"#).unwrap();
    let rendered = |source: &str| {
        let template = Template::compile("test", source).unwrap();
        let context = Paint::All(Arc::clone(&ink)).json(&variables);
        template.render(context, Some(&ink), &Moment::default()).unwrap()
    };
    assert_eq!(rendered("{{ x.strip().startswith('<think>') }}{{ x.endswith('/nothink') }}"), "TrueTrue");
    assert_eq!(rendered("{{ x.find('hi') }}{{ x.count('th') }}{{ x.isspace() }}"), "32False");
    assert_eq!(rendered("{{ '<think>' in x }}{{ x.split('<think>') | length }}"), "False1");
    assert_eq!(ink.plain(&rendered("{{ x.strip() }}")), "<think> hi/nothink");
}

#[test]
fn json_escapes_what_ink_hides() {
    let alphabet = Arc::new(Alphabet::new(["<é|\">".to_owned()]));
    let ink = Arc::new(Ink::new(&alphabet, "").unwrap());
    let variables = Json::parse(r#"{"x": {"b": "<é\"\n", "a<é|\">": 1}}"#).unwrap();
    let rendered = |source: &str| {
        let template = Template::compile("test", source).unwrap();
        let context = Paint::All(Arc::clone(&ink)).json(&variables);
        ink.plain(&template.render(context, Some(&ink), &Moment::default()).unwrap())
    };
    assert_eq!(rendered("{{ x | tojson }}"), r#"{"b": "<é\"\n", "a<é|\">": 1}"#);
    assert_eq!(
        rendered("{{ x | tojson(ensure_ascii=True, sort_keys=True) }}"),
        r#"{"a<\u00e9|\">": 1, "b": "<\u00e9\"\n"}"#
    );
}
