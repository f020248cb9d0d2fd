//! The stride zoo: every way in which a `[batch, heads, len, dim]` tensor is met in memory.
//!
//! Strides are in elements. Inputs may repeat an address; outputs may not. Deliberately absent: data.

/// Strides with a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// What it looks like.
    pub name: &'static str,
    /// Strides in elements, canonical order.
    pub strides: [isize; 4],
    /// Elements of storage before and after what is reached.
    pub slack: usize,
    /// Whether every element has an address of its own.
    pub injective: bool,
}

impl Placement {
    /// Row-major, without slack.
    #[must_use]
    pub fn contiguous(shape: [usize; 4]) -> Self {
        zoo(shape).swap_remove(0)
    }
}

/// Every placement of a tensor that is read. The first is row-major.
#[must_use]
pub fn zoo(shape: [usize; 4]) -> Vec<Placement> {
    let [b, h, s, d] = shape.map(|n| n.max(1) as isize);
    let kept = |name, strides| Placement { name, strides, slack: 0, injective: true };
    let shared = |name, strides| Placement { name, strides, slack: 0, injective: false };
    vec![
        kept("contiguous", [h * s * d, s * d, d, 1]),
        Placement { slack: 37, ..kept("offset", [h * s * d, s * d, d, 1]) },
        kept("permuted from [b, s, h, d]", [s * h * d, d, h * d, 1]),
        kept("permuted from [s, b, h, d]", [h * d, d, b * h * d, 1]),
        kept("len and dim transposed", [h * s * d, s * d, 1, s]),
        kept("permute(0, 3, 2, 1)", [d * s * h, 1, h, s * h]),
        kept("batch innermost", [1, b, b * h, b * h * s]),
        kept("rows sliced from wider rows", [h * s * (d + 3), s * (d + 3), d + 3, 1]),
        kept("len narrowed", [h * (s + 5) * d, (s + 5) * d, d, 1]),
        kept("heads narrowed", [(h + 1) * s * d, s * d, d, 1]),
        kept("step 2 in dim", [2 * h * s * d, 2 * s * d, 2 * d, 2]),
        kept("step 2 in len", [2 * h * s * d, 2 * s * d, 2 * d, 1]),
        kept("packed qkv [b, s, 3, h, d]", [3 * s * h * d, d, 3 * h * d, 1]),
        kept("interleaved qkv [b, s, h, 3, d]", [3 * s * h * d, 3 * d, 3 * h * d, 1]),
        kept("len reversed", [h * s * d, s * d, -d, 1]),
        kept("dim reversed", [h * s * d, s * d, d, -1]),
        kept("all reversed", [-h * s * d, -s * d, -d, -1]),
        kept("heads reversed, step 3 in dim", [3 * h * s * d, -3 * s * d, 3 * d, 3]),
        shared("batch expanded", [0, s * d, d, 1]),
        shared("heads expanded", [s * d, 0, d, 1]),
        shared("len expanded", [h * d, d, 0, 1]),
        shared("dim expanded", [h * s, s, 1, 0]),
        shared("all expanded", [0, 0, 0, 0]),
        shared("sliding windows (unfold)", [h * (s + d), s + d, 1, 1]),
    ]
}

/// Every placement of a tensor that is written.
#[must_use]
pub fn output_zoo(shape: [usize; 4]) -> Vec<Placement> {
    zoo(shape).into_iter().filter(|placement| placement.injective).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::element_offsets;

    #[test]
    fn injective_means_that_no_address_is_met_twice() {
        for shape in [[2, 3, 4, 5], [1, 1, 7, 2], [3, 2, 1, 1], [1, 2, 0, 3]] {
            for placement in zoo(shape) {
                let mut addresses = element_offsets(shape, placement.strides);
                let all = addresses.len();
                addresses.sort_unstable();
                addresses.dedup();
                assert!(!placement.injective || addresses.len() == all, "{placement:?} of {shape:?}");
            }
        }
    }
}
