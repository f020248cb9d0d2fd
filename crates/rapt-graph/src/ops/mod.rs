//! The operators: one file per family.
//!
//! A family is an enum whose variants hold typed arguments. Its `read` makes a variant of an ATen overload, its `infer` says
//! the forms of the results, its `eval` computes them. What only makes views, or returns its input, has no `eval`.

mod arrange;
mod attention;
mod bag;
mod bits;
mod choice;
mod contract;
mod conv;
mod copy;
mod create;
mod cross;
mod diagonal;
mod distance;
mod einsum;
mod factors;
mod fill;
mod frexp;
mod gamma;
mod index;
mod join;
mod linear;
mod loss;
mod margin;
mod matrix_norm;
mod moe;
mod norm;
mod pad;
mod patches;
mod pointwise;
mod pool;
mod quantile;
mod rearrange;
mod recurrent;
mod reduce;
mod renorm;
mod resample;
mod running;
mod sample;
mod scan;
mod scatter;
mod search;
mod shape;
mod similarity;
mod sort;
mod special;
mod std_sort;
mod svd;
mod sym;
mod system;
mod target;
mod trilinear;
mod unpool;
mod view;
mod volume;
mod weight;
mod written;

pub use arrange::{Arrange, Side};
pub use attention::Attention;
pub use bag::Bag;
pub use choice::Choice;
pub use contract::Contract;
pub use conv::{Conv, ConvSizes, Padding};
pub use copy::Copy;
pub use create::{Create, DtypeOf, Order, Sizes};
pub use cross::Cross;
pub use diagonal::Diagonal;
pub use distance::Distance;
pub use einsum::{Einsum, Equation, Name};
pub use frexp::Frexp;
pub use index::Index;
pub use join::{Join, Joining};
pub use linear::Linear;
pub use loss::Loss;
pub use margin::Margin;
pub use matrix_norm::MatrixNorm;
pub use moe::GroupedMm;
pub use norm::{EACH_CHANNEL, Norm, groups_of};
pub use pad::{Pad, PadMode, Run};
pub use patches::Patches;
pub use pointwise::{Binary, Emitter, Formula, Look, Operand, Pointwise, Unary};
pub use pool::{Axis, Pool, Steps, Window};
pub use quantile::Quantile;
pub use rearrange::{Rearrange, Rearrangement};
pub use recurrent::Recurrent;
pub use reduce::{Fold, Reduce};
pub use renorm::Renorm;
pub use resample::Resample;
pub use running::Running;
pub use sample::Sample;
pub use scan::Scan;
pub use scatter::{Scatter, Source, Write};
pub use search::Search;
pub use similarity::Similarity;
pub use sort::Sort;
pub use special::Special;
pub use svd::Svd;
pub use sym::{Sym, SymArg, SymOp};
pub use system::System;
pub use target::Target;
pub use trilinear::Trilinear;
pub use unpool::Unpool;
pub use view::{Form, View};
pub use volume::Volume;
pub use weight::WeightNorm;
pub use written::Written;

use rapt_core::DType;

use crate::{Args, Eval, OpError, Out, Shapes, Tensor, ValueId};

macro_rules! families {
    ($( $(#[$doc:meta])* $family:ident($ty:ty); )*) => {
        /// An operation with its arguments.
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub enum Op {
            $( $(#[$doc])* $family($ty), )*
        }

        impl Op {
            /// The operation of a node, or `None` where no family has its operator.
            ///
            /// # Errors
            /// [`OpError`] for arguments that the operator does not take or Rapt does not serve.
            pub fn read(target: &str, args: &Args<'_>) -> Option<Result<Op, OpError>> {
                $( if let Some(op) = <$ty>::read(target, args) {
                    return Some(op.and_then(|op| args.done().map(|()| Op::$family(op))));
                } )*
                None
            }

            /// The forms of the results.
            ///
            /// # Errors
            /// [`OpError`] where the operands do not fit.
            pub fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
                match self { $( Op::$family(op) => op.infer(shapes), )* }
            }

            /// The tensor that the operation writes to, if it works in place.
            #[must_use]
            pub fn mutates(&self) -> Option<ValueId> {
                match self { $( Op::$family(op) => op.mutates(), )* }
            }

            /// Computes the results into tensors of the inferred forms.
            ///
            /// # Errors
            /// [`OpError`] for what only the values show, such as an index out of range.
            pub fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
                match self { $( Op::$family(op) => op.eval(eval, outs), )* }
            }
        }
    };
}

impl Op {
    /// Replaces tensors that ATen promotes inside of the operator. `form` gives dtype and rank, `cast` the promoted tensor.
    pub(crate) fn promote(
        &mut self,
        form: &dyn Fn(ValueId) -> Option<(DType, usize)>,
        cast: &mut dyn FnMut(ValueId, DType) -> ValueId,
    ) {
        match self {
            Op::Pointwise(op) => op.promote(form, cast),
            Op::Search(op) => op.promote(form, cast),
            Op::Special(op) => op.promote(form, cast),
            Op::Written(op) => op.op.promote(form, cast),
            _ => {}
        }
    }
}

families! {
    /// Views: the same storage in another form.
    View(View);
    /// The operand's elements in another form, dtype or place.
    Copy(Copy);
    /// Tensors of known numbers.
    Create(Create);
    /// Arithmetic on sizes, and what programs assert.
    Sym(Sym);
    /// Operators that compute each element from those at its place.
    Pointwise(Pointwise);
    /// Numbers in another order, or beside each other.
    Arrange(Arrange);
    /// Scaled dot-product attention.
    Attention(Attention);
    /// Convolutions.
    Conv(Conv);
    /// Sums of products by the names of dimensions.
    Einsum(Einsum);
    /// Reading by index.
    Index(Index);
    /// Products of matrices.
    Linear(Linear);
    /// Products of groups of rows.
    GroupedMm(GroupedMm);
    /// Normalisations.
    Norm(Norm);
    /// Elements around a tensor.
    Pad(Pad);
    /// Pooling and resizing.
    Pool(Pool);
    /// Copies of views in another shape.
    Rearrange(Rearrange);
    /// Reductions.
    Reduce(Reduce);
    /// Running products and extrema.
    Running(Running);
    /// Along a dimension that stays.
    Scan(Scan);
    /// Writing by index.
    Scatter(Scatter);
    /// Places and membership.
    Search(Search);
    /// Angles between vectors.
    Similarity(Similarity);
    /// Order.
    Sort(Sort);
    /// Functions of each element that no kernel has.
    Special(Special);
    /// One number of many by its rank.
    Choice(Choice);
    /// Distances between vectors.
    Distance(Distance);
    /// Products of vectors and of matrices, element by element.
    Cross(Cross);
    /// Diagonals and triangles.
    Diagonal(Diagonal);
    /// Losses.
    Loss(Loss);
    /// Patches of images as columns.
    Patches(Patches);
    /// Recurrent layers.
    Recurrent(Recurrent);
    /// Resizing by weights along each dimension.
    Resample(Resample);
    /// Images read at computed places.
    Sample(Sample);
    /// Pooling of volumes.
    Volume(Volume);
    /// Weights as a direction and a length.
    WeightNorm(WeightNorm);
    /// Sums, means and extrema of rows of a table.
    Bag(Bag);
    /// Norms of matrices.
    MatrixNorm(MatrixNorm);
    /// Singular values.
    Svd(Svd);
    /// Systems of linear equations.
    System(System);
    /// Parts of floats.
    Frexp(Frexp);
    /// Sums of products of three tensors.
    Trilinear(Trilinear);
    /// Sums of products of two tensors, powers and chains of matrices.
    Contract(Contract);
    /// Losses with a margin.
    Margin(Margin);
    /// Quantiles.
    Quantile(Quantile);
    /// Slices with a greatest length.
    Renorm(Renorm);
    /// Companions of pooling and sampling.
    Unpool(Unpool);
    /// Results written into a tensor, of operators that have no way of their own to do so. The last: it asks the others.
    Written(Written);
}
