use proptest::prelude::*;

use super::*;

fn decode(parts: &[&[u8]]) -> Vec<String> {
    let mut utf8 = Utf8::default();
    let mut out: Vec<String> = parts.iter().map(|part| utf8.push(part)).collect();
    out.push(utf8.finish());
    out
}

#[test]
fn a_character_comes_out_when_its_last_byte_is_there() {
    assert_eq!(decode(&[b"\xF0", b"\x9F\x98", b"\x80!"]), ["", "", "😀!", ""]);
    assert_eq!(decode(&[b"a\xC3", b"\xA9b"]), ["a", "éb", ""]);
}

#[test]
fn each_maximal_invalid_part_is_one_replacement_as_soon_as_it_is_proven() {
    assert_eq!(decode(&[b"\xFF"]), ["\u{FFFD}", ""]);
    assert_eq!(decode(&[b"\xF0\x9F", b"a"]), ["", "\u{FFFD}a", ""]);
    assert_eq!(decode(&[b"\xF0\x9F\x98"]), ["", "\u{FFFD}"]);
    assert_eq!(decode(&[b"\x98\x80"]), ["\u{FFFD}\u{FFFD}", ""]);
    assert_eq!(decode(&[b"\xE2", b"\xC3\xA9"]), ["", "\u{FFFD}é", ""]);
    // An overlong form and half a surrogate are invalid from their second byte on.
    assert_eq!(
        decode(&[b"\xC0\xAF", b"\xED", b"\xA0", b"\x80"]),
        ["\u{FFFD}\u{FFFD}", "", "\u{FFFD}\u{FFFD}", "\u{FFFD}", ""]
    );
}

fn scan(stops: &[&str], parts: &[&str]) -> (String, Option<String>, String) {
    let mut scanner = StopScanner::new(stops.iter().map(ToString::to_string).collect());
    let mut out = String::new();
    for part in parts {
        let (certain, stop) = scanner.push(part);
        out.push_str(&certain);
        if stop.is_some() {
            return (out, stop, String::new());
        }
    }
    let held = scanner.finish();
    (out, None, held)
}

#[test]
fn only_what_may_begin_a_stop_string_is_held() {
    let none = |out: &str, held: &str| (out.to_owned(), None, held.to_owned());
    assert_eq!(scan(&["END"], &["the E"]), none("the ", "E"));
    assert_eq!(scan(&["END"], &["the EN", "x"]), none("the ENx", ""));
    assert_eq!(scan(&["aab"], &["aaa"]), none("a", "aa"));
    assert_eq!(scan(&["", "é!"], &["caf", "é"]), none("caf", "é"));
    assert_eq!(scan(&[], &["x"]), none("x", ""));
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let found = |out: &str, stop: &str| (out.to_owned(), Some(stop.to_owned()), String::new());
    assert_eq!(scan(&["END"], &["the E", "N", "D x"]), found("the ", "END"));
    assert_eq!(scan(&["aab"], &["aa", "ab"]), found("a", "aab"));
    assert_eq!(scan(&["bcd", "c"], &["abcd"]), found("ab", "c"));
    assert_eq!(scan(&["b", "ab"], &["xab"]), found("x", "ab"));
    assert_eq!(scan(&["日本"], &["a日", "本b"]), found("a", "日本"));
}

/// The outcome by the definition: the first character at which a stop string ends, the longest of those that do.
fn by_definition(text: &str, stops: &[String]) -> (String, Option<String>) {
    for (at, c) in text.char_indices() {
        let head = &text[..at + c.len_utf8()];
        let ending = stops.iter().filter(|stop| !stop.is_empty() && head.ends_with(stop.as_str()));
        if let Some(stop) = ending.max_by_key(|stop| stop.len()) {
            return (head[..head.len() - stop.len()].to_owned(), Some(stop.clone()));
        }
    }
    (text.to_owned(), None)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_scan_is_a_function_of_the_text(
        parts in prop::collection::vec("[abé]{0,4}", 0..8),
        stops in prop::collection::vec("[abé]{0,4}", 0..4),
    ) {
        let text = parts.concat();
        let (expected, expected_stop) = by_definition(&text, &stops);
        let mut scanner = StopScanner::new(stops.clone());
        let (mut fed, mut out, mut stopped) = (String::new(), String::new(), None);
        for part in &parts {
            let (certain, stop) = scanner.push(part);
            fed.push_str(part);
            out.push_str(&certain);
            if stop.is_some() {
                stopped = stop;
                break;
            }
            // What is held is the longest end of the text that begins a stop string, and no more.
            let begins = |tail: &str| stops.iter().any(|stop| stop.len() > tail.len() && stop.starts_with(tail));
            let cuts = fed.char_indices().map(|(at, _)| at).chain([fed.len()]);
            let certain_end = cuts.into_iter().find(|at| *at == fed.len() || begins(&fed[*at..]));
            prop_assert_eq!(Some(out.len()), certain_end);
        }
        if stopped.is_none() {
            out.push_str(&scanner.finish());
        }
        prop_assert_eq!((out, stopped), (expected, expected_stop));
    }

    #[test]
    fn bytes_give_the_same_text_however_they_are_cut(parts in prop::collection::vec(bytes(), 0..8)) {
        let slices: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        prop_assert_eq!(decode(&slices).concat(), String::from_utf8_lossy(&parts.concat()).into_owned());
    }
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop::sample::select(b"a\xC3\xA9\xF0\x9F\x98\x80\xED\xA0\xFF\xE2\x82\xAC".to_vec());
    prop::collection::vec(byte, 0..5)
}
