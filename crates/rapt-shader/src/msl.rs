//! Texts in Metal's language: those of wgsl/, translated word by word and line by line.
//!
//! ```text
//! WGSL                                        Metal
//! struct Params, bindings                     struct Params; struct Attention with a member for each binding
//! const, struct, fn, var<workgroup>           members of Attention, in their order; workgroup memory is declared in the kernel
//! let x = …;   var x = …;   var x: T;         const auto x = …;   auto x = …;   T x = {};
//! if c { … }   switch x { … }                 if (c) { … }   switch (x) { … }
//! vec4<f32>(…)   vec4<u32>()   Block(…)       float4(…)   uint4(0u)   Block{…}
//! bitcast<T>(x)   round(x)   1.5              as_type<T>(x)   rint(x)   1.5f
//! atomicStore(&x, y)   workgroupBarrier()     atomic_store_explicit(&x, y, memory_order_relaxed)   threadgroup_barrier(…)
//! given: Params   let p = given;   f(p, x)    p, a member of Attention   nothing   f(x)
//! alias X = T;                                T, wherever X stands
//! coop_mat8x8<f16, A>   M()                   simdgroup_half8x8   make_filled_simdgroup_matrix<float, 8>(0.0f)
//! coopLoadT<M>(&x, y)   coopStore(m, &x, y)   load_rows<M>(&x, y)   store_columns(m, &x, y), of SIMDGROUP below
//! ```
//! The rest is the same in both: operators, as far as brackets say what binds (which WGSL asks for), calls, loops, members, select(f, t, c).
//! Deliberately absent: all of WGSL that wgsl/ does not use. What is translated wrongly does not compile or does not conform; docs/internals/metal.md
//! says how that is found, and why this is no library's work.

use std::fmt::Write;

/// Words that WGSL leaves free and Metal does not.
const RENAMED: [(&str, &str); 2] = [("thread", "thread_index"), ("half", "half_bits")];

/// The binding of the parameters, which WGSL reads once and hands on by this name; in Metal they are in memory for constants, a member that all functions see.
const GIVEN: &str = "given";
const PARAMS: &str = "p";

/// A declaration of workgroup memory.
struct Shared {
    /// The type of its elements, and `[count]` where it is an array.
    element: String,
    count: String,
    name: String,
}

/// A buffer: how its parameter is declared, and what it is called.
struct Buffer {
    declaration: String,
    name: String,
    index: String,
}

/// `text`, which is of a kernel in WGSL, with its buffers' elements declared as they are read.
pub(crate) fn translated(text: &str) -> String {
    let tokens = tokens(text);
    let structs = tokens.windows(3).filter(|three| three[0] == "struct").map(|three| three[2]).collect();
    let mut translator = Translator {
        tokens,
        at: 0,
        structs,
        aliases: Vec::new(),
        buffers: Vec::new(),
        shared: Vec::new(),
        threads: "",
        has_simdgroups: false,
    };
    let head = translator.items_until_bindings();
    let members = translator.items();
    let Translator { buffers, shared, threads, has_simdgroups, .. } = translator;

    let helpers = [(UNIFORM_LOAD, text.contains("workgroupUniformLoad")), (SIMDGROUP, has_simdgroups)];
    let helpers: String = helpers.iter().filter(|(_, is_called)| *is_called).map(|(helper, _)| *helper).collect();
    let mut whole = format!("{HEAD}{head}\nstruct Attention {{\n{helpers}");
    for line in members.trim_end().lines() {
        let _ = if line.is_empty() { writeln!(whole) } else { writeln!(whole, "    {line}") };
    }
    let _ = writeln!(whole, "}};\n\n[[kernel, max_total_threads_per_threadgroup({threads})]] void attention(");
    for Buffer { declaration, name, index } in &buffers {
        let _ = writeln!(whole, "    {declaration}{name} [[buffer({index})]],");
    }
    let [parameter, argument] = if has_simdgroups { [SUBGROUP, ", subgroup"] } else { [""; 2] };
    let _ = write!(whole, "{GRID}{parameter}\n) {{\n");
    for Shared { element, count, name } in &shared {
        // Numbers of elements name constants of Attention.
        let count =
            count.split_inclusive([' ', '[']).map(|word| match word.starts_with(|c: char| c.is_ascii_uppercase()) {
                true => format!("Attention::{word}"),
                false => word.to_owned(),
            });
        let _ = writeln!(whole, "    threadgroup {element} {name}{};", count.collect::<String>());
    }
    let members = buffers.iter().map(|buffer| &buffer.name).chain(shared.iter().map(|shared| &shared.name));
    let members: Vec<&str> = members.map(String::as_str).collect();
    let members = members.join(", ");
    let _ = writeln!(whole, "    Attention{{{members}}}.attention(group, groups, thread_index{argument});\n}}");
    whole
}

/// Arithmetic as it is written, where a compiler can be told. Fast arithmetic is within the tolerance too, but a row of one key may then be off its
/// value by a unit in the last place.
const HEAD: &str = "#include <metal_stdlib>

using namespace metal;

#if defined(__METAL_VERSION__) && __METAL_VERSION__ >= 320
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
#endif

";

const GRID: &str = "    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]]";
const SUBGROUP: &str = ",\n    uint subgroup [[simdgroup_index_in_threadgroup]]";

/// What WGSL has as one function and Metal does not.
const UNIFORM_LOAD: &str = "    // Metal: what all threads read alike.
    static uint uniform_load(threadgroup atomic_uint* from) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const auto loaded = atomic_load_explicit(from, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        return loaded;
    }

";

/// What WGSL has of matrices and Metal says otherwise: vectors of four in threadgroup memory as elements, `pitch` vectors from one row or column to the next.
const SIMDGROUP: &str = "    // Metal: what the text calls of its matrices, and of memory that is not aligned.
    static const threadgroup half* elements(const threadgroup half4* fours) { return (const threadgroup half*)fours; }
    static const threadgroup float* elements(const threadgroup float4* fours) { return (const threadgroup float*)fours; }
    template <class Matrix, class Fours>
    static Matrix load_rows(const threadgroup Fours* from, uint pitch) {
        Matrix matrix;
        simdgroup_load(matrix, elements(from), pitch * 4u);
        return matrix;
    }
    template <class Matrix, class Fours>
    static Matrix load_columns(const threadgroup Fours* from, uint pitch) {
        Matrix matrix;
        simdgroup_load(matrix, elements(from), pitch * 4u, 0, true);
        return matrix;
    }
    static void store_columns(simdgroup_float8x8 matrix, threadgroup float4* to, uint pitch) {
        simdgroup_store(matrix, (threadgroup float*)to, pitch * 4u, 0, true);
    }
    template <class Matrix>
    static simdgroup_float8x8 multiply_add(Matrix a, Matrix b, simdgroup_float8x8 c) {
        simdgroup_float8x8 sum;
        simdgroup_multiply_accumulate(sum, a, b, c);
        return sum;
    }
    static uint2 packed_four(const device ushort* at) { return as_type<uint2>(ushort4(*(const device packed_ushort4*)at)); }
    static uint4 packed_four(const device uint* at) { return uint4(*(const device packed_uint4*)at); }
#if defined(__METAL_VERSION__)
    // Metal: where MLX declares inputs of fewer than 8 elements.
    static uint2 packed_four(const constant ushort* at) { return as_type<uint2>(ushort4(*(const constant packed_ushort4*)at)); }
    static uint4 packed_four(const constant uint* at) { return uint4(*(const constant packed_uint4*)at); }
#endif

";

/// Words, numbers, comments, runs of space, and all else character by character.
fn tokens(text: &str) -> Vec<&str> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let end = |of: &dyn Fn(char) -> bool| rest.find(|c| !of(c)).unwrap_or(rest.len());
        let length = match first {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            c if c.is_whitespace() => end(&char::is_whitespace),
            c if c.is_ascii_digit() => number_length(rest),
            c if is_word(c) => end(&is_word),
            c => c.len_utf8(),
        };
        let (token, further) = rest.split_at(length);
        tokens.push(token);
        rest = further;
    }
    tokens
}

/// The bytes of the number that `text` begins with.
fn number_length(text: &str) -> usize {
    let bytes = text.as_bytes();
    let is_hexadecimal = text.starts_with("0x");
    let is_part = |at: usize| match bytes[at] {
        b'.' | b'u' | b'x' => true,
        // The sign of an exponent.
        b'-' | b'+' => !is_hexadecimal && bytes[at - 1] == b'e',
        byte => byte.is_ascii_hexdigit(),
    };
    (1..bytes.len()).find(|&at| !is_part(at)).unwrap_or(bytes.len())
}

struct Translator<'t> {
    tokens: Vec<&'t str>,
    at: usize,
    structs: Vec<&'t str>,
    /// What stands for a type, and the type.
    aliases: Vec<(&'t str, String)>,
    buffers: Vec<Buffer>,
    shared: Vec<Shared>,
    /// Of a workgroup.
    threads: &'t str,
    /// Whether the kernel asks for the number of its simdgroup.
    has_simdgroups: bool,
}

impl<'t> Translator<'t> {
    fn peek(&self) -> &'t str {
        self.tokens.get(self.at).copied().unwrap_or_default()
    }

    fn next(&mut self) -> &'t str {
        let token = self.peek();
        self.at += 1;
        token
    }

    /// The next token that is neither space nor comment.
    fn next_word(&mut self) -> &'t str {
        self.skip_space();
        self.next()
    }

    fn skip_space(&mut self) {
        while self.at < self.tokens.len() && is_space(self.peek()) {
            self.at += 1;
        }
    }

    /// Passes over `words`, which are the next ones.
    fn pass(&mut self, words: &[&str]) {
        for word in words {
            let next = self.next_word();
            debug_assert_eq!(next, *word, "wgsl/ has a form that is not translated");
        }
    }

    fn items_until_bindings(&mut self) -> String {
        let mut text = String::new();
        while !["", "@"].contains(&self.peek()) {
            self.item(&mut text);
        }
        text
    }

    fn items(&mut self) -> String {
        let mut text = String::new();
        while !self.peek().is_empty() {
            self.item(&mut text);
        }
        text
    }

    /// Adds the next item of a module, or the space before it, to `text`.
    fn item(&mut self, text: &mut String) {
        match self.next() {
            "struct" => {
                let (name, fields) = (self.next_word(), self.fields());
                let _ = write!(text, "struct {name} {{{fields}}};");
            }
            "const" => {
                let (name, ty) = self.named();
                self.pass(&["="]);
                let value = self.until(&[";"]);
                self.pass(&[";"]);
                let _ = write!(text, "static constant constexpr {ty} {name} ={value};");
            }
            "alias" => {
                let name = self.next_word();
                self.pass(&["="]);
                let ty = self.ty();
                self.pass(&[";"]);
                self.aliases.push((name, ty));
                // Nothing stands where it stood.
                self.at += usize::from(self.peek() == "\n");
            }
            "@" => self.attributed(text),
            "var" => {
                self.pass(&["<", "workgroup", ">"]);
                self.workgroup(text);
            }
            "fn" => self.function(text),
            other => text.push_str(other),
        }
    }

    /// `name: T`.
    fn named(&mut self) -> (&'t str, String) {
        let name = renamed(self.next_word());
        self.pass(&[":"]);
        (name, self.ty())
    }

    /// What stands in the braces of a struct.
    fn fields(&mut self) -> String {
        self.pass(&["{"]);
        let mut fields = String::new();
        loop {
            match self.peek() {
                "}" => break,
                token if is_space(token) || token == "," => {
                    fields.push_str(if token == "," { "" } else { token });
                    self.at += 1;
                }
                _ => {
                    let (name, ty) = self.named();
                    let _ = write!(fields, "{ty} {name};");
                }
            }
        }
        self.pass(&["}"]);
        fields
    }

    /// A binding, or the begin of the kernel, behind its first `@`.
    fn attributed(&mut self, text: &mut String) {
        match self.next_word() {
            "group" => {
                self.pass(&["(", "0", ")", "@", "binding", "("]);
                let index = self.next_word().to_owned();
                self.pass(&[")", "var", "<", "storage", ","]);
                let is_written = self.next_word() == "read_write";
                self.pass(&[">"]);
                let name = self.next_word();
                let name = if name == GIVEN { PARAMS } else { name };
                self.pass(&[":"]);
                let declaration = match self.peek_word() {
                    "array" => {
                        self.pass(&["array", "<"]);
                        let element = self.ty();
                        self.pass(&[">"]);
                        format!("{}device {element}* ", if is_written { "" } else { "const " })
                    }
                    _ => format!("constant {}& ", self.ty()),
                };
                self.pass(&[";"]);
                let _ = write!(text, "{declaration}{name};");
                self.buffers.push(Buffer { declaration, name: name.to_owned(), index });
            }
            attribute => {
                debug_assert_eq!(attribute, "compute", "the kernel");
                self.pass(&["@", "workgroup_size", "("]);
                self.threads = self.next_word();
                self.pass(&[")"]);
                self.skip_space();
            }
        }
    }

    fn peek_word(&mut self) -> &'t str {
        self.skip_space();
        self.peek()
    }

    /// Workgroup memory, a member that refers to what the kernel declares.
    fn workgroup(&mut self, text: &mut String) {
        let name = self.next_word();
        self.pass(&[":"]);
        let (element, count) = self.array_or_type();
        self.pass(&[";"]);
        let refers = if count.is_empty() { "&" } else { "*" };
        let _ = write!(text, "threadgroup {element}{refers} {name};");
        self.shared.push(Shared { element, count, name: name.to_owned() });
    }

    fn function(&mut self, text: &mut String) {
        let name = self.next_word();
        self.pass(&["("]);
        let mut parameters = Vec::new();
        loop {
            match self.next_word() {
                ")" => break,
                "," => {}
                "@" => {
                    self.pass(&["builtin", "("]);
                    self.has_simdgroups |= self.next_word() == "subgroup_id";
                    self.pass(&[")"]);
                }
                _ => {
                    self.at -= 1;
                    let (name, ty) = self.named();
                    if name != PARAMS {
                        parameters.push(format!("{ty} {name}"));
                    }
                }
            }
        }
        let answer = match self.peek_word() {
            "-" => {
                self.pass(&["-", ">"]);
                self.ty()
            }
            _ => "void".to_owned(),
        };
        self.pass(&["{"]);
        let statements = self.until(&["}"]);
        self.pass(&["}"]);
        let _ = write!(text, "{answer} {name}({}) {{{statements}}}", parameters.join(", "));
    }

    /// A type that a value has.
    fn ty(&mut self) -> String {
        let (element, count) = self.array_or_type();
        debug_assert_eq!(count, "", "an array is declared, and never a part of a type");
        element
    }

    /// A type, or that of an array's elements with their number.
    fn array_or_type(&mut self) -> (String, String) {
        match self.next_word() {
            "array" => {
                self.pass(&["<"]);
                let element = self.ty();
                self.pass(&[","]);
                let count = self.until(&[">"]);
                self.pass(&[">"]);
                (element, format!("[{}]", count.trim()))
            }
            vector @ ("vec2" | "vec3" | "vec4") => {
                self.pass(&["<"]);
                let element = scalar(self.next_word());
                self.pass(&[">"]);
                (format!("{element}{}", &vector[3..]), String::new())
            }
            "atomic" => {
                self.pass(&["<", "u32", ">"]);
                ("atomic_uint".to_owned(), String::new())
            }
            "coop_mat8x8" => {
                self.pass(&["<"]);
                let element = scalar(self.next_word());
                self.pass(&[","]);
                self.next_word();
                self.pass(&[">"]);
                (format!("simdgroup_{element}8x8"), String::new())
            }
            other => (self.aliased(other).unwrap_or_else(|| scalar(other)).to_owned(), String::new()),
        }
    }

    /// The type for which `name` stands, if it does.
    fn aliased(&self, name: &str) -> Option<&str> {
        self.aliases.iter().find(|(alias, _)| *alias == name).map(|(_, ty)| ty.as_str())
    }

    /// Everything up to one of `stops` that is in no bracket.
    fn until(&mut self, stops: &[&str]) -> String {
        let mut text = String::new();
        let mut depth = 0;
        while self.at < self.tokens.len() {
            let token = self.peek();
            if depth == 0 && stops.contains(&token) {
                break;
            }
            match token {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth -= 1,
                _ => {}
            }
            self.at += 1;
            self.put(token, &mut text);
        }
        text
    }

    /// What stands in the parentheses that open next.
    fn arguments(&mut self) -> String {
        self.pass(&["("]);
        let arguments = self.until(&[")"]);
        self.pass(&[")"]);
        arguments
    }

    /// Adds `token`, which was read, to `text`, with what of the tokens behind it belongs to its form.
    fn put(&mut self, token: &'t str, text: &mut String) {
        match token {
            "let" if self.tokens[self.at..].starts_with(&[" ", PARAMS, " ", "=", " ", GIVEN, ";"]) => self.at += 8,
            "let" => text.push_str("const auto"),
            "(" if self.tokens[self.at..].starts_with(&[PARAMS, ",", " "]) => {
                self.at += 3;
                text.push('(');
            }
            "var" => self.variable(text),
            "if" | "switch" => {
                self.skip_space();
                let condition = self.until(&["{"]);
                let _ = write!(text, "{token} ({}) ", condition.trim_end());
            }
            "bitcast" => {
                self.pass(&["<"]);
                let ty = self.ty();
                self.pass(&[">"]);
                let _ = write!(text, "as_type<{ty}>");
            }
            "vec2" | "vec3" | "vec4" => {
                self.at -= 1;
                let ty = self.ty();
                let of = self.arguments();
                let _ = write!(text, "{ty}({})", if of.is_empty() { zero(&ty) } else { &of });
            }
            "atomicStore" | "atomicLoad" => {
                let name = if token == "atomicStore" { "atomic_store_explicit" } else { "atomic_load_explicit" };
                let _ = write!(text, "{name}({}, memory_order_relaxed)", self.arguments());
            }
            "atomicMin" | "atomicMax" => {
                let name = if token == "atomicMin" { "atomic_fetch_min_explicit" } else { "atomic_fetch_max_explicit" };
                let _ = write!(text, "{name}({}, memory_order_relaxed)", self.arguments());
            }
            "workgroupUniformLoad" => text.push_str("uniform_load"),
            "unpack2x16float" => {
                let _ = write!(text, "float2(as_type<half2>({}))", self.arguments());
            }
            "coopLoad" | "coopLoadT" => {
                self.pass(&["<"]);
                let ty = self.ty();
                self.pass(&[">"]);
                let name = if token == "coopLoadT" { "load_rows" } else { "load_columns" };
                let _ = write!(text, "{name}<{ty}>");
            }
            "coopStore" => text.push_str("store_columns"),
            "coopMultiplyAdd" => text.push_str("multiply_add"),
            "workgroupBarrier" => {
                self.arguments();
                text.push_str("threadgroup_barrier(mem_flags::mem_threadgroup)");
            }
            "round" => text.push_str("rint"),
            name if self.structs.contains(&name) => {
                let _ = write!(text, "{name}{{{}}}", self.arguments());
            }
            number if number.starts_with(|c: char| c.is_ascii_digit()) => {
                let is_float = number.contains('.') && !number.starts_with("0x");
                let _ = write!(text, "{number}{}", if is_float { "f" } else { "" });
            }
            name if self.aliased(name).is_some_and(|ty| ty.starts_with("simdgroup")) => {
                self.arguments();
                text.push_str("make_filled_simdgroup_matrix<float, 8>(0.0f)");
            }
            name if let Some(ty) = self.aliased(name).map(str::to_owned) => {
                let of = self.arguments();
                let _ = write!(text, "{ty}({})", if of.is_empty() { zero(&ty) } else { &of });
            }
            word => text.push_str(scalar(renamed(word))),
        }
    }

    /// A variable behind its `var`.
    fn variable(&mut self, text: &mut String) {
        let name = renamed(self.next_word());
        match self.next_word() {
            ":" => {
                let (element, count) = self.array_or_type();
                let _ = write!(text, "{element} {name}{count} = {{}}");
            }
            _ => match self.peek_word() {
                "array" => {
                    let (element, count) = self.array_or_type();
                    let _ = write!(text, "{element} {name}{count} = {{{}}}", self.arguments());
                }
                _ => {
                    let _ = write!(text, "auto {name} = ");
                }
            },
        }
    }
}

fn is_space(token: &str) -> bool {
    token.starts_with("//") || token.starts_with(char::is_whitespace)
}

fn renamed(word: &str) -> &str {
    RENAMED.iter().find(|(wgsl, _)| *wgsl == word).map_or(word, |(_, metal)| metal)
}

/// What Metal calls a type of one number; other words stay.
fn scalar(word: &str) -> &str {
    match word {
        "f32" => "float",
        "f16" => "half",
        "u32" => "uint",
        "i32" => "int",
        "u16" => "ushort",
        "u8" => "uchar",
        other => other,
    }
}

/// The zero of a vector's components.
fn zero(vector: &str) -> &'static str {
    match vector.trim_end_matches(|c: char| c.is_ascii_digit()) {
        "float" => "0.0f",
        "bool" => "false",
        "int" => "0",
        _ => "0u",
    }
}
