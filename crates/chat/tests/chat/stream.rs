//! Tokens to text: the same for every cut, and the same as the original tokenizer's.

use flint_chat::{Piece, StreamOptions, TextStream};
use proptest::prelude::*;
use serde_json::Value;
use tokenizers::Tokenizer;

use crate::{Files, fixture, tiny};

const TOKENS: u32 = 5120;

/// What a stream gave: thinking, answer, stop string.
#[derive(Debug, Default, PartialEq, Eq)]
struct Reply {
    reasoning: String,
    content: String,
    stop: Option<String>,
}

impl Reply {
    fn add(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => self.reasoning.push_str(&text),
                Piece::Content(text) => self.content.push_str(&text),
            }
        }
    }
}

fn run(options: &StreamOptions, tokens: &[u32]) -> Reply {
    let mut stream = tiny().stream(options.clone());
    let mut reply = Reply::default();
    for token in tokens {
        reply.add(stream.push(*token));
    }
    reply.add(stream.finish());
    assert_eq!(stream.finish(), [], "the end comes once");
    reply.stop = stream.stopped().map(str::to_owned);
    reply
}

fn open() -> u32 {
    tiny().encode_trusted("<think>").unwrap()[0]
}

fn close() -> u32 {
    tiny().encode_trusted("</think>").unwrap()[0]
}

/// Tokens of single bytes.
fn spelled(bytes: &[u8]) -> Vec<u32> {
    let token = |byte: &u8| (0..TOKENS).find(|token| tiny().token_bytes(*token) == [*byte]).unwrap();
    bytes.iter().map(token).collect()
}

fn thinking(stop: &[&str]) -> StreamOptions {
    StreamOptions {
        in_reasoning: true,
        split_reasoning: true,
        stop: stop.iter().map(ToString::to_string).collect(),
    }
}

/// The reply by the definition, from all bytes at once. `None` stands for the token that ends the thinking.
fn by_definition(options: &StreamOptions, parts: &[Option<Vec<u8>>]) -> Reply {
    let split = options.split_reasoning;
    let end = if split && options.in_reasoning { parts.iter().position(Option::is_none) } else { Some(0) };
    let join = |parts: &[Option<Vec<u8>>]| {
        let bytes = parts.iter().map(|part| part.clone().unwrap_or_else(|| b"</think>".to_vec()));
        String::from_utf8_lossy(&bytes.collect::<Vec<_>>().concat()).into_owned()
    };
    let Some(end) = end else { return Reply { reasoning: join(parts), ..Reply::default() } };
    let (before, after) = parts.split_at(end);
    let after = if split && options.in_reasoning { &after[1..] } else { after };
    let answer = join(after);
    let answer = if split { answer.trim_start() } else { &answer };
    let reply = Reply { reasoning: join(before), content: answer.to_owned(), stop: None };
    for (at, c) in answer.char_indices() {
        let head = &answer[..at + c.len_utf8()];
        let ending = options.stop.iter().filter(|stop| !stop.is_empty() && head.ends_with(stop.as_str()));
        if let Some(stop) = ending.max_by_key(|stop| stop.len()) {
            let content = head[..head.len() - stop.len()].to_owned();
            return Reply { content, stop: Some(stop.clone()), ..reply };
        }
    }
    reply
}

#[test]
fn every_token_decodes_as_in_the_original_tokenizer() {
    let original = Tokenizer::from_bytes(Files::read().tokenizer).unwrap();
    for token in 0..TOKENS {
        let whole = original.decode(&[token], false).unwrap();
        assert_eq!(tiny().decode(&[token]), whole, "token {token}");
        let mut stream = original.decode_stream(false);
        match stream.step(token).unwrap() {
            Some(text) => assert_eq!(run(&StreamOptions::default(), &[token]).content, text, "token {token}"),
            // It never gives up waiting, even for bytes that are proven invalid.
            None => assert!(whole.is_empty() || whole.ends_with('\u{FFFD}'), "token {token}"),
        }
    }
    let all: Vec<u32> = (0..TOKENS).collect();
    let whole = original.decode(&all, false).unwrap();
    assert_eq!(tiny().decode(&all), whole);
    assert_eq!(run(&StreamOptions::default(), &all).content, whole);
    assert_eq!(tiny().decode(&[TOKENS, u32::MAX]), "");
}

#[test]
fn text_comes_out_at_the_same_tokens_as_from_the_original_stream() {
    let original = Tokenizer::from_bytes(Files::read().tokenizer).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&fixture("prompts.json")).unwrap();
    let mut steps = 0;
    for case in &cases {
        let tokens = tiny().encode_trusted(case["text"].as_str().unwrap()).unwrap();
        let mut theirs = original.decode_stream(false);
        let mut ours = tiny().stream(StreamOptions::default());
        for token in tokens {
            let expected = theirs.step(token).unwrap().map(Piece::Content);
            assert_eq!(ours.push(token), expected.into_iter().collect::<Vec<_>>());
            steps += 1;
        }
    }
    assert!(steps > 2000);
}

#[test]
fn encoding_and_decoding_give_the_text_back() {
    for text in
        ["", " a  b\n\n", "żółć 日本語 😀👩‍👩‍👧 e\u{301}", "<|user|></think>", "\u{0}\u{7f}\u{85}\u{2028}"]
    {
        assert_eq!(tiny().decode(&tiny().encode(text).unwrap()), text);
        assert_eq!(tiny().decode(&tiny().encode_trusted(text).unwrap()), text);
    }
    assert_eq!(tiny().encode("<think>").unwrap().iter().filter(|token| **token >= 5084).count(), 0);
    assert_eq!(tiny().encode_trusted("<think>").unwrap().len(), 1);
}

#[test]
fn thinking_ends_at_the_token_and_not_at_its_spelling() {
    let mut tokens = spelled(b"a</think>b");
    tokens.push(close());
    tokens.extend(spelled(b"\n\n c"));
    tokens.extend([close(), open()]);
    let reply = run(&thinking(&[]), &tokens);
    assert_eq!(reply.reasoning, "a</think>b");
    assert_eq!(reply.content, "c</think><think>");
}

#[test]
fn a_reply_that_never_ends_its_thinking_is_all_thinking() {
    let reply = run(&thinking(&["a"]), &spelled("  na ja ż".as_bytes()));
    assert_eq!(reply, Reply { reasoning: "  na ja ż".into(), ..Reply::default() });
}

#[test]
fn an_opening_at_the_start_of_the_output_is_dropped_once() {
    let tokens = [vec![open(), open()], spelled(b"a"), vec![close()], spelled(b"b")].concat();
    let reply = run(&thinking(&[]), &tokens);
    assert_eq!((reply.reasoning.as_str(), reply.content.as_str()), ("<think>a", "b"));
    let answering = StreamOptions { split_reasoning: true, ..StreamOptions::default() };
    assert_eq!(run(&answering, &tokens).content, "<think>a</think>b");
    assert_eq!(run(&StreamOptions::default(), &tokens).content, "<think><think>a</think>b");
}

#[test]
fn a_broken_character_does_not_cross_the_end_of_the_thinking() {
    let tokens = [spelled(b"\xF0\x9F"), vec![close()], spelled(b"\x98\x80!")].concat();
    let reply = run(&thinking(&[]), &tokens);
    assert_eq!((reply.reasoning.as_str(), reply.content.as_str()), ("\u{FFFD}", "\u{FFFD}\u{FFFD}!"));
}

#[test]
fn stop_strings_end_the_answer_and_leave_the_thinking_alone() {
    let tokens = [spelled(b"STOP"), vec![close()], spelled(b" one STOP two")].concat();
    let reply = run(&thinking(&["STOP", ""]), &tokens);
    assert_eq!(reply, Reply { reasoning: "STOP".into(), content: "one ".into(), stop: Some("STOP".into()) });
    let whole = StreamOptions { split_reasoning: false, ..thinking(&["</think>"]) };
    assert_eq!(run(&whole, &tokens).content, "STOP");
}

#[test]
fn after_a_stop_string_nothing_comes() {
    let mut stream: TextStream =
        tiny().stream(StreamOptions { stop: vec!["b".into()], ..StreamOptions::default() });
    assert_eq!(stream.push(spelled(b"a")[0]), [Piece::Content("a".into())]);
    assert_eq!(stream.push(spelled(b"b")[0]), []);
    assert_eq!(stream.stopped(), Some("b"));
    assert_eq!(stream.push(spelled(b"c")[0]), []);
    assert_eq!(stream.finish(), []);
}

#[test]
fn held_text_comes_out_at_the_end() {
    let mut stream = tiny().stream(StreamOptions { stop: vec!["end".into()], ..StreamOptions::default() });
    let tokens = spelled(b"en\xC3");
    assert_eq!(tokens.iter().flat_map(|token| stream.push(*token)).count(), 0);
    assert_eq!(stream.finish(), [Piece::Content("en\u{FFFD}".into())]);
}

/// Splits `bytes` at `cuts` and tokenises each piece by itself, so that words become other tokens at every split.
fn cut_tokens(bytes: &[u8], cuts: &[usize]) -> Vec<u32> {
    let ends = cuts.iter().copied().chain([bytes.len()]);
    let mut start = 0;
    let mut tokens = Vec::new();
    for end in ends {
        let piece = &bytes[start..end];
        match std::str::from_utf8(piece) {
            Ok(text) => tokens.extend(tiny().encode(text).unwrap()),
            Err(_) => tokens.extend(spelled(piece)),
        }
        start = end;
    }
    tokens
}

#[test]
fn a_reply_is_the_same_for_every_pair_of_split_points() {
    let reasoning = "Let me think: żółć 😀.\n".as_bytes();
    let answer = "\n\n Świetnie, 日本語 <think> STO STÓP STOP more".as_bytes();
    for options in [thinking(&["STOP"]), thinking(&[]), thinking(&["ÓP", "語 <", "ÓP S"])] {
        let parts = [Some(reasoning.to_vec()), None, Some(answer.to_vec())];
        let expected = by_definition(&options, &parts);
        assert!(options.stop.is_empty() || expected.stop.is_some());
        for first in 0..=answer.len() {
            for second in first..=answer.len() {
                let mut tokens = cut_tokens(reasoning, &[first.min(reasoning.len())]);
                tokens.push(close());
                tokens.extend(cut_tokens(answer, &[first, second]));
                assert_eq!(run(&options, &tokens), expected, "cut at {first} and {second}");
            }
        }
    }
}

/// Pieces of replies: text, parts of characters, invalid bytes, the end of the thinking.
fn part() -> impl Strategy<Value = Option<Vec<u8>>> {
    prop_oneof![
        1 => Just(None),
        8 => prop::collection::vec(prop::sample::select(b"ab \n\xC3\xB3\xF0\x9F\x98\x80\xFF".to_vec()), 0..6).prop_map(Some),
        4 => "[ab ó😀]{0,5}".prop_map(|text| Some(text.into_bytes())),
    ]
}

proptest! {
    #![proptest_config(crate::cases(512))]

    #[test]
    fn streamed_is_whole(
        parts in prop::collection::vec(part(), 0..10),
        stop in prop::collection::vec("[ab ó😀]{0,3}", 0..3),
        in_reasoning: bool,
        split_reasoning: bool,
    ) {
        let options = StreamOptions { in_reasoning, stop, split_reasoning };
        let tokens = parts.iter().flat_map(|part| match part {
            None => vec![close()],
            Some(bytes) => cut_tokens(bytes, &[]),
        });
        prop_assert_eq!(run(&options, &tokens.collect::<Vec<_>>()), by_definition(&options, &parts));
    }

    #[test]
    fn any_tokens_stream_to_what_they_decode_to(tokens in prop::collection::vec(0..TOKENS + 2, 0..40)) {
        let reply = run(&StreamOptions::default(), &tokens);
        prop_assert_eq!(&reply.content, &tiny().decode(&tokens));
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| tiny().token_bytes(*token)).collect();
        prop_assert_eq!(reply.content, String::from_utf8_lossy(&bytes).into_owned());
    }
}
