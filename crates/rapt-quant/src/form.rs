//! From a scheme and a shape: the shapes of codes and scales, and which scale an element has.
//!
//! ```text
//! granularity   one scale for each           shape of the scales of x [.., S, D]
//! tensor        tensor                       []
//! head          matrix [S, D]                [..]
//! token         row over D                   [.., S]
//! channel       column over S                [.., 1, D]
//! block         n elements along D           [.., S, ceil(D / n)]; the last block of a row may be shorter
//! ```
//! Codes have the shape of x; where two share a byte, the last size is ceil(D / 2), and the upper half of a last odd byte is 0.

use rapt_core::{DType, Error, Format, Granularity, MAX_RANK, ScaleLayout, Shape, swizzle};

use crate::{QuantError, Result};

/// A format, its granularity, and how its scales lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scheme {
    format: Format,
    granularity: Granularity,
    scale_layout: ScaleLayout,
}

impl Scheme {
    /// A scheme. Without a granularity it is the format's own blocks, or the tensor.
    ///
    /// # Errors
    /// [`Error::Option`]: blocks of 0 elements, another granularity than the format's own, swizzled scales in f32.
    pub fn new(format: Format, granularity: Option<Granularity>, scale_layout: ScaleLayout) -> Result<Self> {
        let own = format.own_block_size().map(Granularity::Block);
        let granularity = granularity.or(own).unwrap_or(Granularity::Tensor);
        let refuse = |option, got: String, allowed: String| Err(Error::Option { option, got, allowed }.into());
        if own.is_some_and(|own| own != granularity) {
            let allowed = format!("None, or block {}: those of {format}", format.own_block_size().unwrap_or(0));
            return refuse("granularity", granularity.to_string(), allowed);
        }
        if granularity == Granularity::Block(0) {
            return refuse("block_size", "0".to_owned(), "an int from 1 up".to_owned());
        }
        if scale_layout != ScaleLayout::Plain && own.is_none() {
            let allowed = format!("'plain': the scales of {format} are float32");
            return refuse("scale_layout", format!("'{}'", scale_layout.name()), allowed);
        }
        Ok(Scheme { format, granularity, scale_layout })
    }

    /// The number format.
    #[must_use]
    pub const fn format(&self) -> Format {
        self.format
    }

    /// Which elements share a scale.
    #[must_use]
    pub const fn granularity(&self) -> Granularity {
        self.granularity
    }

    /// How the scales lie.
    #[must_use]
    pub const fn scale_layout(&self) -> ScaleLayout {
        self.scale_layout
    }
}

/// The shapes of all parts of a quantized tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    scheme: Scheme,
    shape: Shape,
    codes_shape: Shape,
    scale_shape: Shape,
    /// Rows of a matrix, elements of a row.
    rows: usize,
    columns: usize,
}

/// The last two sizes; 1 where a dimension is missing.
fn matrix(shape: &Shape) -> (usize, usize) {
    let at = |back: usize| shape.len().checked_sub(back).map_or(1, |d| shape[d]);
    (at(2), at(1))
}

impl Form {
    /// The form of a tensor of this shape.
    ///
    /// # Errors
    /// [`Error::Rank`] if the granularity asks for dimensions that are not there; [`Error::Overflow`].
    pub fn new(scheme: Scheme, shape: Shape) -> Result<Self> {
        let rank = shape.len();
        let (least, allowed) = match scheme.granularity {
            Granularity::Tensor if scheme.format.code_bits() == 8 => (0, ""),
            Granularity::Head | Granularity::Channel => (2, "granularity 'head' and 'channel' ask for at least 2"),
            Granularity::Tensor => (1, "codes that share a byte ask for at least 1"),
            _ => (1, "granularity 'token' and 'block' ask for at least 1"),
        };
        if rank < least {
            return Err(Error::Rank { tensor: "x", got: rank, shape, allowed }.into());
        }
        let overflow = || QuantError::from(Error::Overflow { tensor: "x", shape, strides: [].into() });
        shape.numel().ok_or_else(overflow)?;
        let (rows, columns) = matrix(&shape);
        let mut codes_shape = shape.to_vec();
        if let Some(last) = codes_shape.last_mut().filter(|_| scheme.format.code_bits() == 4) {
            *last = last.div_ceil(2);
        }
        let lead = |dims: usize| shape[..rank - dims].to_vec();
        let scale_shape = match (scheme.granularity, scheme.scale_layout) {
            (Granularity::Tensor, _) => Vec::new(),
            (Granularity::Head, _) => lead(2),
            (Granularity::Token, _) => lead(1),
            (Granularity::Channel, _) => [lead(2), vec![1, columns]].concat(),
            (Granularity::Block(size), ScaleLayout::Plain) => [lead(1), vec![columns.div_ceil(size)]].concat(),
            (Granularity::Block(size), ScaleLayout::Swizzle32x4x4) => {
                let numel = swizzle::padded_numel(rows, columns.div_ceil(size)).ok_or_else(overflow)?;
                [lead(rank.min(2)), vec![numel]].concat()
            }
        };
        let shape_of = |sizes: Vec<usize>| Shape::new(&sizes).ok_or_else(overflow);
        debug_assert!(scale_shape.len() <= MAX_RANK);
        let scale_shape = shape_of(scale_shape)?;
        scale_shape.numel().and_then(|n| n.checked_mul(4)).ok_or_else(overflow)?;
        Ok(Form { scheme, shape, codes_shape: shape_of(codes_shape)?, scale_shape, rows, columns })
    }

    /// Format, granularity and scale layout.
    #[must_use]
    pub const fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The number format.
    #[must_use]
    pub const fn format(&self) -> Format {
        self.scheme.format
    }

    /// The shape of the numbers.
    #[must_use]
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The shape of the tensor of codes, whose dtype is [`Format::code_dtype`].
    #[must_use]
    pub const fn codes_shape(&self) -> &Shape {
        &self.codes_shape
    }

    /// The shape of the scales, whose dtype is [`Format::scale_dtype`], and of the zero points (uint8).
    #[must_use]
    pub const fn scale_shape(&self) -> &Shape {
        &self.scale_shape
    }

    /// Bytes of all parts together.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        // Both products were checked when the form was made; codes are at most a byte for each element.
        let count = |shape: &Shape| shape.numel().unwrap_or(0);
        let format = self.format();
        let each = format.scale_dtype().size_bytes() + usize::from(format.has_zero_point());
        let global = if format.has_global_scale() { DType::F32.size_bytes() } else { 0 };
        count(&self.codes_shape) + count(&self.scale_shape) * each + global
    }

    /// The number of rows of all matrices: the lines of the tensor, if its rows have any element.
    pub(crate) fn lines(&self) -> usize {
        self.shape.numel().unwrap_or(0).checked_div(self.columns).unwrap_or(0)
    }

    /// How many neighbours in a row share a scale; at least 1.
    pub(crate) fn chunk(&self) -> usize {
        match self.scheme.granularity {
            Granularity::Channel => 1,
            Granularity::Block(size) => size,
            _ => self.columns.max(1),
        }
    }

    /// The scales of a row.
    pub(crate) fn chunks(&self) -> usize {
        self.columns.div_ceil(self.chunk())
    }

    /// The group of the first chunk of a row; those of the next chunks follow.
    pub(crate) fn first_group(&self, line: usize) -> usize {
        match self.scheme.granularity {
            Granularity::Tensor => 0,
            Granularity::Head => line / self.rows,
            Granularity::Token => line,
            Granularity::Channel => line / self.rows * self.columns,
            Granularity::Block(_) => line * self.chunks(),
        }
    }

    /// The number of groups: of scales, padding left out.
    pub(crate) fn groups(&self) -> usize {
        match self.scheme.scale_layout {
            ScaleLayout::Plain => self.scale_shape.numel().unwrap_or(0),
            ScaleLayout::Swizzle32x4x4 => self.lines() * self.chunks(),
        }
    }

    /// Where the scale of a group stands among the scales.
    pub(crate) fn place(&self, group: usize) -> usize {
        match self.scheme.scale_layout {
            ScaleLayout::Plain => group,
            ScaleLayout::Swizzle32x4x4 => {
                let chunks = self.chunks();
                let (line, chunk) = (group / chunks, group % chunks);
                let matrix = swizzle::padded_numel(self.rows, chunks).unwrap_or(0);
                line / self.rows * matrix + swizzle::swizzled(line % self.rows, chunk, chunks)
            }
        }
    }
}
