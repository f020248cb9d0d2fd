//! Rust source without its comments, so that a rule about code does not fire on a word of explanation.
//!
//! Comments become spaces and lines keep their numbers. Strings stay: what a program prints is code. Deliberately
//! absent: a parser; what begins and ends a comment, a string and a character literal is all that matters here.

/// `source` with every comment blanked.
pub(crate) fn without_comments(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let end = match &bytes[at..] {
            [b'/', b'/', ..] => {
                let end = line_end(bytes, at);
                blank(&bytes[at..end], &mut out);
                at = end;
                continue;
            }
            [b'/', b'*', ..] => {
                let end = block_end(bytes, at);
                blank(&bytes[at..end], &mut out);
                at = end;
                continue;
            }
            [b'"', ..] => string_end(bytes, at + 1),
            [b'r', b'"' | b'#', ..] if !follows_word(bytes, at) => raw_string_end(bytes, at).unwrap_or(at + 1),
            [b'b', b'r', b'"' | b'#', ..] if !follows_word(bytes, at) => {
                raw_string_end(bytes, at + 1).unwrap_or(at + 1)
            }
            [b'\'', ..] => character_end(bytes, at),
            _ => at + 1,
        };
        out.extend_from_slice(&bytes[at..end]);
        at = end;
    }
    // Only whole runs were blanked or copied, and each run begins and ends at an ASCII byte.
    String::from_utf8_lossy(&out).into_owned()
}

fn blank(comment: &[u8], out: &mut Vec<u8>) {
    out.extend(comment.iter().map(|byte| if *byte == b'\n' { b'\n' } else { b' ' }));
}

fn line_end(bytes: &[u8], at: usize) -> usize {
    bytes[at..].iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |length| at + length)
}

/// Block comments nest in Rust.
fn block_end(bytes: &[u8], at: usize) -> usize {
    let (mut depth, mut at) = (1, at + 2);
    while at < bytes.len() && depth > 0 {
        match &bytes[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    at.min(bytes.len())
}

fn string_end(bytes: &[u8], mut at: usize) -> usize {
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// From the `r` of `r"…"` or `r#"…"#`; `None` for a raw identifier.
fn raw_string_end(bytes: &[u8], at: usize) -> Option<usize> {
    let hashes = bytes[at + 1..].iter().take_while(|byte| **byte == b'#').count();
    let start = at + 1 + hashes;
    if bytes.get(start) != Some(&b'"') {
        return None;
    }
    let mut end = vec![b'#'; hashes + 1];
    end[0] = b'"';
    let length = bytes[start + 1..].windows(end.len()).position(|window| window == end);
    Some(length.map_or(bytes.len(), |length| start + 1 + length + end.len()))
}

/// `'x'`, `'\n'` and `'"'` are characters; `'a` is a lifetime.
fn character_end(bytes: &[u8], at: usize) -> usize {
    if bytes.get(at + 1) == Some(&b'\\') {
        let close = bytes[(at + 3).min(bytes.len())..].iter().position(|byte| *byte == b'\'');
        return close.map_or(bytes.len(), |length| at + 3 + length + 1);
    }
    // A character takes up to four bytes; a lifetime is never closed.
    let close = (at + 2..at + 6).find(|end| bytes.get(*end) == Some(&b'\''));
    match close {
        Some(end) if end == at + 2 || bytes[at + 1] >= 0x80 => end + 1,
        _ => at + 1,
    }
}

fn follows_word(bytes: &[u8], at: usize) -> bool {
    at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(source: &str, kept: &[&str], gone: &[&str]) {
        let text = without_comments(source);
        assert_eq!(text.lines().count(), source.lines().count(), "{text}");
        for word in kept {
            assert!(text.contains(word), "{word} must stay in {text:?}");
        }
        for word in gone {
            assert!(!text.contains(word), "{word} must go from {text:?}");
        }
    }

    #[test]
    fn comments_go_and_code_stays() {
        check("let a = 1; // torch\nlet b = 2;", &["let a", "let b"], &["torch"]);
        check("//! torch\n/// numpy\nfn f() {}", &["fn f"], &["torch", "numpy"]);
        check("a /* torch /* numpy */ pyo3 */ b\n", &["a ", " b"], &["torch", "numpy", "pyo3"]);
        check("a /* open\n torch", &["a "], &["torch"]);
    }

    #[test]
    fn strings_and_characters_are_code() {
        check(r#"let a = "// torch"; // gone"#, &["// torch"], &["gone"]);
        check(r##"let a = r#"/* " torch"#; // gone"##, &["/* \" torch"], &["gone"]);
        check(r#"let a = "\" // torch"; // gone"#, &["// torch"], &["gone"]);
        check("let a = '\"'; // gone\nlet b = 'é'; // gone", &["let b"], &["gone"]);
        check(r"let a = '\''; // gone", &["let a"], &["gone"]);
        check("fn f<'a>(x: &'a str) {} // gone", &["'a str"], &["gone"]);
        check("let r#type = 1; // gone", &["r#type"], &["gone"]);
    }
}
