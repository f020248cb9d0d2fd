// Numbers of tiles of matrices that are float32, of float32 and bfloat16, which are exact in it: four elements are their float32 bits, and so many are loaded
// at a time. Weights are not rounded, and at most 1, as a value may be close to the largest number: SHIFT is −8.

alias Four = vec4<u32>;
alias Numbers = vec4<f32>;
const LOADED: u32 = 4u;
const ONE: f32 = 0.00390625;
const HAS_FINITE_SUMS: bool = false;

// Of four numbers: their top bits where they are not finite, besides others.
fn exponents_of(words: vec4<u32>) -> vec4<u32> { return (words & vec4<u32>(INFINITY_BITS)) + vec4<u32>(0x00800000u); }
fn are_odd(exponents: vec4<u32>) -> bool { return any((exponents & vec4<u32>(SIGN_BIT)) != vec4<u32>()); }
// 0 in the place of what is not finite.
fn finite_four(words: vec4<u32>) -> vec4<u32> {
    return words & ~(((exponents_of(words) & vec4<u32>(SIGN_BIT)) >> vec4<u32>(31u)) * 0xffffffffu);
}
fn exponents_of_load(words: vec4<u32>) -> vec4<u32> { return exponents_of(words); }
fn finite_load(words: vec4<u32>) -> vec4<u32> { return finite_four(words); }
fn numbers(words: vec4<u32>) -> vec4<f32> { return bitcast<vec4<f32>>(words); }
fn put(at: u32, words: vec4<u32>) { tile[at] = numbers(words); }

// What a score is above its reference is at most GROWTH.
fn weights_of(distance: vec4<f32>) -> vec4<f32> { return exponential(distance) * ONE; }
fn factor_of(x: vec4<f32>) -> vec4<f32> { return exponential(x); }
fn rounded(weights: vec4<f32>) -> vec4<f32> { return weights; }
