//! How long files and functions may be, and how many arguments a function may take.
//!
//! Rust, CUDA C++ and Python, by their indentation: formatters see to it that a function ends with a brace, or before a line, as
//! far in as it began. Arguments are counted of CUDA's device functions, which no other tool does. Deliberately absent: those of Rust,
//! which clippy counts; here is only where its count may be set aside.

use super::Finding;
use super::sources::Source;

/// About 600 lines is where a file asks to be split by concept; at this many it must be.
const MOST_LINES: usize = 700;

/// Lines of a function, from its name to its end.
const MOST_FUNCTION_LINES: usize = 100;

/// Arguments of a function: clippy's limit.
const MOST_ARGUMENTS: usize = 7;

/// The one place where functions take what a signature of Python has.
const SIGNATURES: &str = "bindings/python/src/";

pub(super) fn check(files: &[Source]) -> Vec<Finding> {
    files.iter().filter(|file| !file.is("md")).flat_map(check_file).collect()
}

fn check_file(file: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    let lines: Vec<&str> = file.code.lines().collect();
    if lines.len() > MOST_LINES {
        let what = format!("{} lines: split it by concept (at most {MOST_LINES})", lines.len());
        findings.push(Finding::new(&*file.path, what));
    }
    for (at, line) in lines.iter().enumerate() {
        let Some(name) = function(file, line) else { continue };
        let length = length(&lines[at..], file.is("py"));
        if length > MOST_FUNCTION_LINES {
            let what = format!("`{name}` has {length} lines: split it by concept (at most {MOST_FUNCTION_LINES})");
            findings.push(Finding::at(&file.path, at + 1, what));
        }
        if line.contains("__device__") || line.contains("__global__") {
            let count = arguments(&lines[at..], name);
            if count > MOST_ARGUMENTS {
                let what = format!("`{name}` has {count} arguments: pass a struct (at most {MOST_ARGUMENTS})");
                findings.push(Finding::at(&file.path, at + 1, what));
            }
        }
    }
    let lines = lines.iter().enumerate().filter(|(_, line)| line.contains("clippy::too_many_arguments"));
    if !file.path.starts_with(SIGNATURES) && !file.path.starts_with("xtask/src/tidy/") {
        let what = format!("more than {MOST_ARGUMENTS} arguments: pass a struct");
        findings.extend(lines.map(|(at, _)| Finding::at(&file.path, at + 1, what.as_str())));
    }
    findings
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

fn leading_word(text: &str) -> &str {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or_default()
}

/// The name of the function that begins in this line.
fn function<'l>(file: &Source, line: &'l str) -> Option<&'l str> {
    let text = line.trim_start();
    if file.is("py") {
        return text.strip_prefix("async ").unwrap_or(text).strip_prefix("def ").map(leading_word);
    }
    if file.is("rs") {
        let (before, after) = text.strip_prefix("fn ").map(|after| ("", after)).or_else(|| text.split_once(" fn "))?;
        let is_qualifier = |word: &str| {
            ["const", "unsafe", "extern", "\"C\"", "\"system\""].contains(&word) || word.starts_with("pub")
        };
        let are_qualifiers = before.split(' ').all(|word| word.is_empty() || is_qualifier(word) || word.ends_with(')'));
        return are_qualifiers.then(|| leading_word(after));
    }
    // A definition of C++: a type, a name, a parenthesis, and no semicolon.
    if file.is("cu") || file.is("cuh") {
        // A kernel: its name stands behind its launch bounds.
        if let Some((_, kernel)) = text.split_once("__launch_bounds__(").and_then(|(_, bounds)| bounds.split_once(") "))
        {
            return Some(leading_word(kernel));
        }
        let (before, _) = text.split_once('(')?;
        let name = before.rsplit([' ', '*', '&']).next()?;
        let is_definition = before.contains(' ')
            && !before.contains(['=', '.', '(', '#', '"'])
            && !text.ends_with(';')
            && !["if", "for", "while", "switch", "return", "else", "do"].contains(&leading_word(text));
        return (is_definition && !name.is_empty()).then_some(name);
    }
    None
}

/// Lines from the first to the end of the function that begins there.
fn length(lines: &[&str], is_python: bool) -> usize {
    let depth = indent(lines[0]);
    let rest = lines.iter().enumerate().skip(1);
    if is_python {
        let is_inside =
            |line: &str| line.trim().is_empty() || indent(line) > depth || line.trim_start().starts_with(')');
        let inside = rest.take_while(|(_, line)| is_inside(line)).filter(|(_, line)| !line.trim().is_empty());
        return inside.last().map_or(1, |(at, _)| at + 1);
    }
    // Its closing brace, or another line as far out before it: a declaration without a body.
    for (at, line) in rest {
        if indent(line) == depth && !line.trim().is_empty() {
            match line.trim_start().as_bytes()[0] {
                b'}' => return at + 1,
                // The rest of a signature, and lines of the preprocessor.
                b')' | b'w' | b'{' | b'#' => {}
                _ => return 1,
            }
        }
    }
    1
}

/// How many arguments a function of C++ takes, whose name and first parenthesis are in the first of these lines.
fn arguments(lines: &[&str], name: &str) -> usize {
    let Some(at) = lines[0].find(&format!("{name}(")) else { return 0 };
    let list = &lines[0][at + name.len()..];
    // The name of `operator()` has parentheses of its own.
    let list = list.strip_prefix("()").filter(|rest| rest.starts_with('(')).unwrap_or(list);
    let (mut count, mut depth) = (0_usize, 0_i32);
    for c in std::iter::once(list).chain(lines[1..].iter().copied()).flat_map(str::chars) {
        match c {
            ')' if depth == 1 => break,
            ',' if depth == 1 => count += 1,
            // Commas of a type's own are deeper.
            '(' | '[' | '{' | '<' => depth += 1,
            ')' | ']' | '}' | '>' => depth -= 1,
            _ if !c.is_whitespace() => count = count.max(1),
            _ => {}
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whats(path: &str, text: &str) -> Vec<String> {
        check(&[Source::new(path, text)]).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn long_files_fire_and_long_pages_do_not() {
        assert_eq!(whats("a.rs", &"\n".repeat(MOST_LINES + 1)).len(), 1);
        assert!(whats("a.rs", &"\n".repeat(MOST_LINES)).is_empty());
        assert!(whats("a.md", &"\n".repeat(MOST_LINES + 1)).is_empty());
    }

    #[test]
    fn long_functions_fire_in_each_language() {
        let body = |n: usize, line: &str| format!("    {line}\n").repeat(n);
        for (path, head, line, end) in [
            ("a.rs", "pub(crate) const unsafe fn f(\n    a: u8,\n) -> u8\nwhere\n    u8: Copy,\n{\n", "g();", "}\n"),
            ("a.cu", "__device__ static void f(int a,\n    int b) {\n", "g();", "}\n"),
            ("a.cu", "extern \"C\" __global__ void __launch_bounds__(32, 1) f(int a) {\n", "g();", "}\n"),
            ("a.py", "def f(\n    a,\n):\n", "g()", "\nx = 1\n"),
        ] {
            let function = |n| format!("{head}{}{end}", body(n, line));
            assert_eq!(whats(path, &function(100)).len(), 1, "{path}");
            assert!(whats(path, &function(90)).is_empty(), "{path}");
        }
        assert!(whats("a.rs", &format!("trait T {{\n    fn f();\n    fn g();\n{}}}\n", body(120, "x();"))).is_empty());
    }

    #[test]
    fn many_arguments_of_device_functions_fire() {
        for (before, after) in [
            ("__device__ static void f(", ") {\n}\n"),
            ("template <int A, int B>\n__device__ inline void f(\n    ", "\n) {\n}\n"),
            ("struct S {\n    __device__ S(", ") : a(a), b(b, 1) {}\n};\n"),
            ("struct S {\n    __device__ void operator()(", ") const { g(a, b, c, d, e, f, g, h); }\n};\n"),
            ("extern \"C\" __global__ void __launch_bounds__(32, 1) f(", ") {\n}\n"),
        ] {
            let function = |n| {
                let arguments: Vec<String> = (0..n).map(|at| format!("Tile<A, B> (&a{at})[2]")).collect();
                format!("{before}{}{after}", arguments.join(", "))
            };
            assert_eq!(whats("a.cuh", &function(MOST_ARGUMENTS + 1)).len(), 1, "{before}");
            assert!(whats("a.cuh", &function(MOST_ARGUMENTS)).is_empty(), "{before}");
            // C++ of the host.
            assert!(whats("a.cpp", &function(MOST_ARGUMENTS + 1)).is_empty(), "{before}");
        }
        assert!(whats("a.cuh", "__device__ inline void f() {\n    g(a, b, c, d, e, f, g, h);\n}\n").is_empty());
    }

    #[test]
    fn many_arguments_are_for_signatures_of_python() {
        let text = "#[allow(clippy::too_many_arguments, reason = \"none\")]";
        assert_eq!(whats("crates/rapt/src/lib.rs", text).len(), 1);
        assert!(whats("bindings/python/src/context.rs", text).is_empty());
    }
}
