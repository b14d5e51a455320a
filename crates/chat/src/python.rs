//! Text as Python writes and cuts it.
//!
//! Chat templates are written for Jinja in Python, so white space, number text and string cutting follow CPython,
//! where it differs from Rust. Nothing here knows templates or tokens.

/// White space as `str.isspace` sees one character: Unicode's set and the four ASCII separators that Rust leaves out.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `str.strip()`, `str.lstrip()` and `str.rstrip()`: which ends, and of which characters (`None`: white space).
pub(crate) fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let dropped = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(dropped) } else { text };
    if right { text.trim_end_matches(dropped) } else { text }
}

/// `str.split()` and `str.rsplit()`; `most` is the largest number of cuts (`None`: all).
///
/// Without a separator the pieces between runs of white space, never an empty one. `None` when the separator is empty,
/// which Python refuses.
pub(crate) fn split<'a>(
    text: &'a str,
    separator: Option<&str>,
    most: Option<usize>,
    from_right: bool,
) -> Option<Vec<&'a str>> {
    match (separator, from_right) {
        (Some(""), _) => None,
        (Some(separator), false) => {
            Some(text.splitn(most.map_or(usize::MAX, |most| most.saturating_add(1)), separator).collect())
        }
        (Some(separator), true) => {
            let most = most.map_or(usize::MAX, |most| most.saturating_add(1));
            let mut pieces: Vec<_> = text.rsplitn(most, separator).collect();
            pieces.reverse();
            Some(pieces)
        }
        (None, false) => Some(split_space(text, most)),
        (None, true) => Some(rsplit_space(text, most)),
    }
}

fn split_space(text: &str, most: Option<usize>) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        let end = if most == Some(pieces.len()) { None } else { rest.find(is_space) };
        let (piece, after) = rest.split_at(end.unwrap_or(rest.len()));
        pieces.push(piece);
        rest = after.trim_start_matches(is_space);
    }
    pieces
}

fn rsplit_space(text: &str, most: Option<usize>) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        let cut =
            if most == Some(pieces.len()) { None } else { rest.char_indices().rfind(|(_, c)| is_space(*c)) };
        let start = cut.map_or(0, |(at, c)| at + c.len_utf8());
        let (before, piece) = rest.split_at(start);
        pieces.push(piece);
        rest = before.trim_end_matches(is_space);
    }
    pieces.reverse();
    pieces
}

/// `str.splitlines(keepends)`.
pub(crate) fn split_lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let ends_line = |c: char| {
        matches!(
            c,
            '\n' | '\r'
                | '\u{b}'
                | '\u{c}'
                | '\u{1c}'
                | '\u{1d}'
                | '\u{1e}'
                | '\u{85}'
                | '\u{2028}'
                | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let Some(at) = rest.find(ends_line) else {
            lines.push(rest);
            break;
        };
        let width = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(1, char::len_utf8)
        };
        lines.push(if keep_ends { &rest[..at + width] } else { &rest[..at] });
        rest = &rest[at + width..];
    }
    lines
}

/// `repr(float)`: the shortest digits that read back to the same number.
///
/// Python writes an exponent (of two digits at least) when the first digit stands 17 or more places before the point
/// or five or more behind it.
pub(crate) fn float_text(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.into();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

/// `float` in JSON as `json.dumps` writes it.
pub(crate) fn float_json(value: f64) -> String {
    if value.is_nan() {
        "NaN".into()
    } else if value.is_infinite() {
        if value > 0.0 { "Infinity" } else { "-Infinity" }.into()
    } else {
        float_text(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strip_drops_the_white_space_of_cpython() {
        assert_eq!(strip("\u{1c}\u{1f}\u{85}\u{2028}a b\u{3000}\n", None, true, true), "a b");
        assert_eq!(strip("\u{200b}a\u{feff}", None, true, true), "\u{200b}a\u{feff}");
        assert_eq!(strip("xxaxx", Some("x"), true, false), "axx");
        assert_eq!(strip("xyaxy", Some("yx"), false, true), "xya");
    }

    #[test]
    fn split_cuts_as_python_does() {
        assert_eq!(split("a,b,,c", Some(","), None, false), Some(vec!["a", "b", "", "c"]));
        assert_eq!(split("a,b,,c", Some(","), Some(1), false), Some(vec!["a", "b,,c"]));
        assert_eq!(split("a,b,,c", Some(","), Some(1), true), Some(vec!["a,b,", "c"]));
        assert_eq!(split("", Some(","), None, false), Some(vec![""]));
        assert_eq!(split("a", Some(""), None, false), None);
        assert_eq!(split(" a \u{1c} b\tc ", None, None, false), Some(vec!["a", "b", "c"]));
        assert_eq!(split(" a  b  c ", None, Some(1), false), Some(vec!["a", "b  c "]));
        assert_eq!(split(" a  b  c ", None, Some(1), true), Some(vec![" a  b", "c"]));
        assert_eq!(split("  ", None, None, true), Some(vec![]));
    }

    #[test]
    fn lines_end_where_python_ends_them() {
        assert_eq!(split_lines("a\r\nb\u{2028}c\n\nd", false), ["a", "b", "c", "", "d"]);
        assert_eq!(split_lines("a\r\nb\n", true), ["a\r\n", "b\n"]);
        assert!(split_lines("", false).is_empty());
    }

    #[test]
    fn floats_print_as_python_prints_them() {
        for (value, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (1.5, "1.5"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.234_567_890_123_456_7e16, "1.2345678901234568e+16"),
            (9_007_199_254_740_993.0, "9007199254740992.0"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1e-7, "1e-07"),
            (-2.5e-310, "-2.5e-310"),
            (1.797_693_134_862_315_7e308, "1.7976931348623157e+308"),
        ] {
            assert_eq!(float_text(value), text);
        }
        assert_eq!(float_json(f64::NEG_INFINITY), "-Infinity");
    }
}
