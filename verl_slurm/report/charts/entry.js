// The parts of Apache ECharts that the page uses; `make charts` bundles them into ../assets/echarts.min.js.
import { init, use } from "echarts/core";
import { CustomChart, LineChart } from "echarts/charts";
import { DataZoomInsideComponent, GridComponent, TooltipComponent } from "echarts/components";
import { SVGRenderer } from "echarts/renderers";

use([CustomChart, LineChart, DataZoomInsideComponent, GridComponent, TooltipComponent, SVGRenderer]);

export { init };
