// Numbers of tiles of matrices that are float16: an element is loaded as it lies, four are two words, and what a thread loads at a time is eight.
// Weights are 2^SHIFT times as large: normal numbers of float16 from 2^-20 to 2^8 beside the reference. Sums of products of float16 are finite.
// Deliberately absent: bfloat16, whose numbers leave those of float16 (floats.wgsl).

alias Four = vec2<u32>;
alias Numbers = vec4<f16>;
const LOADED: u32 = 8u;
const SHIFT: f32 = 6.0;
const ONE: f32 = 64.0;
const HAS_FINITE_SUMS: bool = true;

// Of two halves in a word: their top bits where they are not finite, besides others.
const TOP_BITS: u32 = 0x80008000u;
fn exponents_of(words: vec2<u32>) -> vec2<u32> { return (words & vec2<u32>(0x7c007c00u)) + vec2<u32>(0x04000400u); }
fn are_odd(exponents: vec2<u32>) -> bool { return any((exponents & vec2<u32>(TOP_BITS)) != vec2<u32>()); }
// 0 in the place of what is not finite.
fn finite_four(words: vec2<u32>) -> vec2<u32> {
    return words & ~(((exponents_of(words) & vec2<u32>(TOP_BITS)) >> vec2<u32>(15u)) * 0xffffu);
}
fn exponents_of_load(words: vec4<u32>) -> vec2<u32> { return exponents_of(words.xy) | exponents_of(words.zw); }
fn finite_load(words: vec4<u32>) -> vec4<u32> { return vec4<u32>(finite_four(words.xy), finite_four(words.zw)); }
fn numbers(words: vec2<u32>) -> vec4<f16> {
    return vec4<f16>(vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)));
}
fn put(at: u32, words: vec4<u32>) {
    tile[at] = numbers(words.xy);
    tile[at + 1u] = numbers(words.zw);
}

// WGSL's exp2 may be off by 3 + 2·|x| units in the last place of float32: less than 2^-18, of which weights keep 11 bits and lse 17.
fn weights_of(distance: vec4<f32>) -> vec4<f32> { return exp2(fma(distance, vec4<f32>(LOG2_E), vec4<f32>(SHIFT))); }
fn factor_of(x: vec4<f32>) -> vec4<f32> { return exp2(x * LOG2_E); }
fn rounded(weights: vec4<f32>) -> vec4<f16> { return vec4<f16>(weights); }
