//! The algebra: coalesce, composition, complement, inverses.
//!
//! ```text
//! composition    (A∘B)(i) = A(B(i))
//! complement     A* of A in m: A and A* meet in 0 alone, and their sums are 0 … at least m − 1, each once
//! right inverse  A(A⁻(i)) = i                   left inverse  A⁻(A(i)) = i
//! ```
//! Results are CuTe's where CuTe's conditions hold. Where they do not, CuTe may hand back a layout for which the law is
//! false; here that is an [`Error::NoSuchLayout`]. Sources as in `layout`. Deliberately absent: any rounding of a request
//! that does not divide.

use crate::error::{Error, Result};
use crate::int_tuple::{IntTuple, mul};
use crate::layout::{Layout, Mode};
use crate::tiler::Tiler;

pub(crate) fn refuse(operation: &'static str, layout: &Layout, why: impl Into<String>) -> Error {
    Error::NoSuchLayout { operation, layout: layout.to_string(), why: why.into() }
}

impl Layout {
    /// The same function with as few modes as possible, flat.
    #[must_use]
    pub fn coalesce(&self) -> Layout {
        let modes = coalesced(&self.flat());
        // The function is unchanged, so that what `new` checks holds as before.
        Layout::from_flat(&modes).unwrap_or_else(|_| self.clone())
    }

    /// Coalesces each mode that `profile` has a leaf for, apart.
    ///
    /// # Errors
    /// [`Error::Rank`] if the profile has more modes than the layout.
    pub fn coalesce_by(&self, profile: &IntTuple) -> Result<Layout> {
        let IntTuple::Tuple(profiles) = profile else { return Ok(self.coalesce()) };
        let modes = self.at_least("coalesce", profiles.len())?;
        let by_mode = modes.into_iter().enumerate().map(|(at, mode)| match profiles.get(at) {
            Some(profile) => mode.coalesce_by(profile),
            None => Ok(mode),
        });
        Layout::from_modes(by_mode.collect::<Result<Vec<_>>>()?)
    }

    /// Without modes of stride 0 or extent 1: the same set of offsets.
    #[must_use]
    pub fn filter(&self) -> Layout {
        let moving: Vec<Mode> =
            self.flat().into_iter().filter(|(extent, stride)| *extent > 1 && *stride != 0).collect();
        Layout::from_flat(&coalesced(&moving)).unwrap_or_else(|_| self.clone())
    }

    /// `self ∘ other`: the layout R with R(i) = self(other(i)), of a shape that `other`'s coordinates fit.
    ///
    /// # Errors
    /// [`Error::NoSuchLayout`] if no layout of that profile does it, or a stride of `other` is negative.
    pub fn compose(&self, other: &Layout) -> Result<Layout> {
        let flat = coalesced(&self.flat());
        let mut room: Vec<i64> = flat.iter().map(|(extent, _)| extent - 1).collect();
        compose_flat(&flat, &mut room, other).map_err(|why| match why {
            Why::Divides(why) => {
                Error::NoSuchLayout { operation: "composition", layout: format!("{self} with {other}"), why }
            }
            Why::Other(error) => error,
        })
    }

    /// By mode for [`Tiler::ByMode`], else [`Layout::compose`].
    ///
    /// # Errors
    /// As [`Layout::compose`]; [`Error::Rank`].
    pub fn compose_tiler(&self, tiler: &Tiler) -> Result<Layout> {
        match tiler {
            Tiler::Layout(layout) => self.compose(layout),
            Tiler::Whole => Ok(self.clone()),
            Tiler::ByMode(tilers) => self.by_mode("composition", tilers, Layout::compose_tiler),
        }
    }

    /// The layout that takes `self` to all of `0 … target − 1`: their offsets are disjoint but for 0, and their sums cover it.
    ///
    /// # Errors
    /// [`Error::NoSuchLayout`] if `self` is not injective (modes of stride 0 aside) or its strides do not divide.
    pub fn complement(&self, target: i64) -> Result<Layout> {
        let operation = "complement";
        if target < 1 {
            return Err(refuse(operation, self, format!("the target {target} is below 1")));
        }
        let mut modes: Vec<Mode> = self.flat().into_iter().filter(|(s, d)| *s > 1 && *d != 0).collect();
        modes.sort_by_key(|(extent, stride)| (*stride, *extent));
        let mut next = 1;
        let mut gaps = Vec::new();
        for (extent, stride) in modes {
            if stride < next || stride % next != 0 {
                let why = format!("stride {stride} is no multiple of {next}, which the smaller modes cover");
                return Err(refuse(operation, self, why));
            }
            gaps.push((stride / next, next));
            next = mul(extent, stride, "a stride")?;
        }
        gaps.push((target / next + i64::from(target % next != 0), next));
        Layout::from_flat(&coalesced(&gaps))
    }

    /// The layout R with self(R(i)) = i for all i below its size, as large as one leads from offset 0 on.
    ///
    /// # Errors
    /// [`Error::Overflow`].
    pub fn right_inverse(&self) -> Result<Layout> {
        let mut before = 1;
        let mut modes = Vec::new();
        for (extent, stride) in self.flat() {
            modes.push((stride, extent, before));
            before = mul(before, extent, "a stride")?;
        }
        modes.sort_unstable();
        let mut next = 1;
        let mut inverse = Vec::new();
        for (stride, extent, index_stride) in modes {
            if extent == 1 || stride < next {
                continue;
            }
            if stride != next {
                break;
            }
            inverse.push((extent, index_stride));
            next = mul(extent, stride, "a stride")?;
        }
        Layout::from_flat(&coalesced(&inverse))
    }

    /// The layout R with R(self(i)) = i for all i below the size of `self`.
    ///
    /// # Errors
    /// [`Error::NoSuchLayout`] as [`Layout::complement`], and for modes of stride 0.
    pub fn left_inverse(&self) -> Result<Layout> {
        if self.flat().iter().any(|(extent, stride)| *extent > 1 && *stride <= 0) {
            return Err(refuse("left inverse", self, "a stride below 1 maps two indices to one offset, or below 0"));
        }
        let rest = self.complement(1)?;
        Layout::from_modes([self.clone(), rest])?.right_inverse()
    }

    pub(crate) fn at_least(&self, operation: &'static str, asked: usize) -> Result<Vec<Layout>> {
        let modes = self.modes();
        if modes.len() < asked {
            return Err(Error::Rank { operation, layout: self.to_string(), rank: modes.len(), asked });
        }
        Ok(modes)
    }

    /// `f` on each mode that has a tiler; further modes as they are.
    pub(crate) fn by_mode(
        &self,
        operation: &'static str,
        tilers: &[Tiler],
        f: impl Fn(&Layout, &Tiler) -> Result<Layout>,
    ) -> Result<Layout> {
        let modes = self.at_least(operation, tilers.len())?;
        let tiled = modes.into_iter().enumerate().map(|(at, mode)| match tilers.get(at) {
            Some(tiler) => f(&mode, tiler),
            None => Ok(mode),
        });
        Layout::from_modes(tiled.collect::<Result<Vec<_>>>()?)
    }
}

/// Merges neighbours s₀:d₀, s₁:s₀·d₀ into s₀·s₁:d₀ and drops extents of 1. `1:0` if nothing is left.
pub(crate) fn coalesced(modes: &[Mode]) -> Vec<Mode> {
    let mut merged: Vec<Mode> = Vec::with_capacity(modes.len());
    for &(extent, stride) in modes.iter().filter(|(extent, _)| *extent != 1) {
        match merged.last_mut() {
            Some(last) if last.0.checked_mul(last.1) == Some(stride) => last.0 *= extent,
            _ => merged.push((extent, stride)),
        }
    }
    if merged.is_empty() { vec![(1, 0)] } else { merged }
}

enum Why {
    Divides(String),
    Other(Error),
}

impl From<Error> for Why {
    fn from(error: Error) -> Self {
        Why::Other(error)
    }
}

/// Mode by mode: A(B₀ + B₁) = A(B₀) + A(B₁) as long as no sum carries from one mode of A into the next. `room` is what
/// each mode of A can still take.
fn compose_flat(flat: &[Mode], room: &mut [i64], other: &Layout) -> Result<Layout, Why> {
    match other.shape() {
        IntTuple::Int(_) => {
            let (extent, stride) = other.flat()[0];
            Ok(Layout::from_flat(&compose_mode(flat, room, extent, stride)?)?)
        }
        IntTuple::Tuple(_) => {
            let modes =
                other.modes().iter().map(|mode| compose_flat(flat, room, mode)).collect::<Result<Vec<_>, _>>()?;
            Ok(Layout::from_modes(modes)?)
        }
    }
}

/// The modes of A∘(extent:stride), A flat and coalesced.
///
/// A mode s:d of A is skipped while the stride is a multiple of s; within a mode that the stride divides, s / stride
/// steps are taken and the rest goes on with stride 1 in the next mode; a stride that does not divide s may only stay
/// inside. The last mode is endless.
fn compose_mode(flat: &[Mode], room: &mut [i64], extent: i64, stride: i64) -> Result<Vec<Mode>, Why> {
    if stride == 0 {
        return Ok(vec![(extent, 0)]);
    }
    if stride < 0 {
        return Err(Why::Divides(format!("stride {stride} is negative")));
    }
    let (mut rest, mut step) = (extent, stride);
    let mut modes = Vec::new();
    let Some(((_, last_stride), inner)) = flat.split_last() else { return Ok(vec![(extent, 0)]) };
    for (&(s, d), room) in inner.iter().zip(room) {
        if rest == 1 {
            break;
        }
        let mut take = |steps: i64, step: i64| {
            *room -= (steps - 1) * step;
            let why = || format!("the modes of {extent}:{stride} and those before it carry out of the mode {s}:{d}");
            if *room < 0 { Err(Why::Divides(why())) } else { Ok((steps, mul(step, d, "a stride")?)) }
        };
        if step % s == 0 {
            step /= s;
        } else if s % step == 0 {
            let taken = rest.min(s / step);
            if rest % taken != 0 {
                let why = format!("{rest} steps of {step} do not fill the mode {s}:{d} a whole number of times");
                return Err(Why::Divides(why));
            }
            modes.push(take(taken, step)?);
            rest /= taken;
            step = 1;
        } else if mul(rest - 1, step, "a reach")? < s {
            modes.push(take(rest, step)?);
            rest = 1;
        } else {
            return Err(Why::Divides(format!(
                "stride {step} neither divides the mode {s}:{d} nor is a multiple of it"
            )));
        }
    }
    if rest != 1 || modes.is_empty() {
        modes.push((rest, mul(step, *last_stride, "a stride")?));
    }
    Ok(modes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(text: &str) -> Layout {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn coalesce_as_in_cutes_documentation() {
        assert_eq!(layout("(2,(1,6)):(1,(6,2))").coalesce().to_string(), "12:1");
        assert_eq!(
            layout("(2,(1,6)):(1,(6,2))").coalesce_by(&"(1,1)".parse().unwrap()).unwrap().to_string(),
            "(2,6):(1,2)"
        );
        let check = |text: &str, expect: &str| assert_eq!(layout(text).coalesce().to_string(), expect, "{text}");
        check("1:0", "1:0");
        check("1:7", "1:0");
        check("(2,4):(1,2)", "8:1");
        check("(2,4):(4,1)", "(2,4):(4,1)");
        check("(2,4,6):(24,6,1)", "(2,4,6):(24,6,1)");
        check("(2,1,3):(2,4,4)", "6:2");
        check("((2,2),(2,2)):((1,4),(8,32))", "(2,4,2):(1,4,32)");
        check("(4,2):(0,0)", "8:0");
    }

    #[test]
    fn composition_as_in_cutes_documentation() {
        let check = |a: &str, b: &str, expect: &str| {
            assert_eq!(layout(a).compose(&layout(b)).unwrap().to_string(), expect, "{a} o {b}");
        };
        check("(6,2):(8,2)", "(4,3):(3,1)", "((2,2),3):((24,2),8)");
        check("20:2", "(5,4):(4,1)", "(5,4):(8,2)");
        check("(10,2):(16,4)", "(5,4):(1,5)", "(5,(2,2)):(16,(80,4))");
        check("((128,128),1,1):((65536,1),0,0)", "(128,64)", "(128,64):(65536,1)");
        check(
            "(128,64):(65536,1)",
            "((128,16),1,4):((64,1),0,16)",
            "(((2,64),16),1,4):(((4194304,1),65536),0,1048576)",
        );
        let by_mode = layout("(12,(4,8)):(59,(13,1))");
        let check = |tiler: &str, expect: &str| {
            assert_eq!(by_mode.compose_tiler(&tiler.parse().unwrap()).unwrap().to_string(), expect, "{tiler}");
        };
        check("<3:4,8:2>", "(3,(2,4)):(236,(26,1))");
        check("<3,8>", "(3,(4,2)):(59,(13,1))");
        check("<_,8>", "(12,(4,2)):(59,(13,1))");
        assert!(matches!(by_mode.compose_tiler(&"<1,1,1>".parse().unwrap()), Err(Error::Rank { asked: 3, .. })));
    }

    #[test]
    fn composition_that_is_no_layout_is_refused() {
        for (a, b) in [
            ("(6,2):(8,2)", "4:4"),
            ("(4,2):(1,10)", "3:2"),
            ("(4,2):(1,10)", "6:1"),
            ("(6,2):(8,2)", "2:-1"),
            ("(2,2):(0,1)", "(2,2):(1,1)"),
        ] {
            let error = layout(a).compose(&layout(b)).unwrap_err();
            assert!(matches!(error, Error::NoSuchLayout { operation: "composition", .. }), "{a} {b}: {error}");
        }
    }

    #[test]
    fn complement_as_in_cutes_documentation() {
        let check = |a: &str, target, expect: &str| {
            assert_eq!(layout(a).complement(target).unwrap().to_string(), expect, "complement({a}, {target})");
        };
        check("4:1", 24, "6:4");
        check("6:4", 24, "4:1");
        check("(4,6):(1,4)", 24, "1:0");
        check("4:2", 24, "(2,3):(1,8)");
        check("(2,4):(1,6)", 24, "3:2");
        check("(2,2):(1,6)", 24, "(3,2):(2,12)");
        check("4:1", 10, "3:4");
        check("(2,2):(4,1)", 24, "(2,3):(2,8)");
        for wrong in ["(4,4):(1,2)", "(2,2):(1,1)", "(2,2):(2,3)"] {
            let error = layout(wrong).complement(24).unwrap_err();
            assert!(matches!(error, Error::NoSuchLayout { operation: "complement", .. }), "{wrong}: {error}");
        }
    }

    #[test]
    fn inverses() {
        assert_eq!(layout("(4,8):(8,1)").right_inverse().unwrap().to_string(), "(8,4):(4,1)");
        assert_eq!(layout("(4,8):(16,1)").right_inverse().unwrap().to_string(), "8:4");
        assert_eq!(layout("4:2").right_inverse().unwrap().to_string(), "1:0");
        assert_eq!(layout("(4,8):(16,1)").left_inverse().unwrap().to_string(), "(16,4):(4,1)");
        assert!(layout("(4,2):(1,0)").left_inverse().is_err());
        assert!(layout("(4,4):(1,2)").left_inverse().is_err());
    }

    #[test]
    fn filter_keeps_the_offsets() {
        assert_eq!(layout("(4,(2,1)):(1,(0,9))").filter().to_string(), "4:1");
        assert_eq!(layout("4:0").filter().to_string(), "1:0");
    }
}
