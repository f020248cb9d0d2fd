//! The loops that `rapt bench` times compute what they say.

use rapt_core::Arch;
use rapt_cpu::available;
use rapt_cpu::ceiling::{ProductRounds, chain, sum};

#[test]
fn every_instruction_set_computes_the_same_rounds() {
    // Twelve vectors of 0.5·0.5 + 0.25 = 0.5, whatever the number of rounds.
    for &arch in available() {
        let fma = ProductRounds::of(arch);
        assert_eq!(fma.arch(), arch);
        assert_eq!(fma.run(1000, 0.5, 0.25), (fma.flops() / 2) as f32 * 0.5, "{arch:?}");
    }
}

#[test]
fn products_of_bfloat16_are_summed_as_often_as_they_are_counted() {
    for &arch in available() {
        // A FLOP is half of a product and a sum: 0.5 · 0.25 for each.
        let Some(products) = ProductRounds::of_bf16(arch) else { continue };
        assert_eq!(products.run(64, 0.5, 0.25), (64 * products.flops() / 2) as f32 * 0.125, "{arch:?}");
    }
    assert!(ProductRounds::of_bf16(Arch::Avx2).is_none());
}

#[test]
fn the_chain_and_the_sum_are_what_they_say() {
    // (3 ^ 3) · 3 = 0, and (0 ^ 3) · 3 = 9.
    assert_eq!(chain(2, 3), 9);
    assert_eq!(sum(&[u64::MAX, 2, 3]), 4);
}
